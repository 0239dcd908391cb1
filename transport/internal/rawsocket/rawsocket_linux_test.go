// SPDX-License-Identifier: Apache-2.0

package rawsocket

import (
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// pair returns both ends of a TCP connection.
func pair(t *testing.T) (server, client net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	client, err = net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	server, err = l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close(); _ = server.Close() })
	return server, client
}

// The timer that wakes the runtime's monitor runs while there are sockets, and no longer.
func TestTheMonitorIsWokenWhileThereAreSockets(t *testing.T) {
	open := func() int {
		monitored.mu.Lock()
		defer monitored.mu.Unlock()
		return monitored.open
	}
	before := open()
	raw, _ := pair(t)
	server := New(raw)
	assert.Equal(t, before+1, open())
	_ = server.Close()
	_ = server.Close()
	assert.Equal(t, before, open())
}

// What a goroutine wrote before it wrote to a socket is there for whoever has read from the other end. Under the race
// detector the test fails without race.go.
func TestAReadComesAfterTheWrite(t *testing.T) {
	a, b := pair(t)
	server, client := New(a), New(b)
	var shared int
	done := make(chan struct{})
	go func() {
		defer close(done)
		shared = 1
		_, _ = client.Write([]byte("x"))
	}()
	_, err := io.ReadFull(server, make([]byte, 1))
	require.NoError(t, err)
	require.Equal(t, 1, shared)
	<-done
}
