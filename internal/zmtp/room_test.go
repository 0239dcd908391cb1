// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Connections that only stand, half open or not, must not keep an engine out that has something to tell; and one that
// has told something is not sent away for them.
func TestSilentPeersMakeRoom(t *testing.T) {
	heard := make(chan string, 1)
	var refused atomic.Int64
	l, err := Listen(t.Context(), "127.0.0.1:0", Config{
		Socket: "PULL", Peers: []string{"PUSH"}, Refused: func() { refused.Add(1) },
		Peer: func(<-chan struct{}) func([]byte) bool {
			return func(body []byte) bool { heard <- string(body); return string(body) == "known" }
		},
	})
	require.NoError(t, err)
	defer l.Close()

	tell := func(conn net.Conn) {
		t.Helper()
		_, err := conn.Write(append([]byte{0, 5}, "known"...))
		require.NoError(t, err)
		select {
		case <-heard:
		case <-time.After(20 * time.Second):
			require.Fail(t, "the message was not taken")
		}
	}
	engine := func() net.Conn {
		conn, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		_, err = conn.Write(append(greeting[:], ready("PUSH")...))
		require.NoError(t, err)
		tell(conn)
		return conn
	}
	first := engine()
	babbler, err := net.Dial("tcp", l.Addr().String()) // it says something, but tells nothing
	require.NoError(t, err)
	defer babbler.Close()
	_, err = babbler.Write(append(append(greeting[:], ready("PUSH")...), "\x00\x01x"...))
	require.NoError(t, err)
	require.Equal(t, "x", <-heard)
	var flood []net.Conn
	began := time.Now()
	for range 2*maxPeers + 10 {
		here, there := net.Pipe()
		flood = append(flood, there)
		l.admit(here)
	}
	l.mu.Lock()
	peers := len(l.peers)
	l.mu.Unlock()
	if time.Since(began) < handshakeTimeout { // on a busy machine the first of the flood have left by themselves
		assert.Equal(t, maxPeers, peers)
		assert.GreaterOrEqual(t, refused.Load(), int64(maxPeers))
	}
	assert.LessOrEqual(t, peers, maxPeers)
	engine()
	tell(first)
	_, err = io.Copy(io.Discard, babbler)
	require.NoError(t, err, "who tells nothing makes room, too")
	_, err = io.Copy(io.Discard, flood[0])
	require.NoError(t, err, "the oldest is told that it was sent away")
	for _, conn := range flood {
		_ = conn.Close()
	}
}
