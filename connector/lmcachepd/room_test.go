// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"container/list"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
)

// Connections that only stand, half open or not, must not keep an engine out that has something to tell; and one that has told something
// is not sent away for them.
func TestSilentPeersMakeRoom(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l := &listener{ln: ln, closed: make(chan struct{}), peers: map[net.Conn]*list.Element{}, waiting: map[string]*waiter{}}
	l.wg.Go(l.accept)
	defer l.end()

	raw, err := msgpack.Marshal(map[string]string{"type": "ProxyNotif", "req_id": "r"})
	require.NoError(t, err)
	tell := func(conn net.Conn) {
		t.Helper()
		w := l.expect("r", 1)
		defer l.forget("r")
		_, err := conn.Write(append([]byte{0, byte(len(raw))}, raw...))
		require.NoError(t, err)
		select {
		case <-w.came:
		case <-time.After(5 * time.Second):
			require.Fail(t, "the notice was not taken")
		}
	}
	engine := func() net.Conn {
		conn, err := net.Dial("tcp", ln.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		_, err = conn.Write(append(greeting[:], command("READY", property("Socket-Type", "PUSH"))...))
		require.NoError(t, err)
		tell(conn)
		return conn
	}
	first := engine()
	var flood []net.Conn
	for range 2*maxPeers + 10 {
		here, there := net.Pipe()
		flood = append(flood, there)
		l.admit(here)
	}
	l.mu.Lock()
	assert.Len(t, l.peers, maxPeers)
	l.mu.Unlock()
	engine()
	tell(first)
	_, err = flood[0].Read(make([]byte, greetingSize))
	if err == nil {
		_, err = flood[0].Read(make([]byte, 1))
	}
	require.ErrorIs(t, err, io.EOF, "the oldest went first")
	for _, conn := range flood {
		_ = conn.Close()
	}
	require.Eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.peers) == 2 && l.silent.Len() == 0
	}, 5*time.Second, time.Millisecond, "nothing is kept of those who have gone")
}
