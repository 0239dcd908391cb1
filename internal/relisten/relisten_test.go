// SPDX-License-Identifier: Apache-2.0

package relisten

import (
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim/freeport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T) (*Listener, chan net.Conn) {
	t.Helper()
	port, err := freeport.One() // the address is bound again
	require.NoError(t, err)
	l, err := Listen(t.Context(), "127.0.0.1:"+port)
	require.NoError(t, err)
	conns := make(chan net.Conn, 4)
	go func() {
		defer close(conns)
		for {
			conn, err := l.Accept()
			if err != nil {
				assert.ErrorIs(t, err, net.ErrClosed)
				return
			}
			conns <- conn
		}
	}()
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		for conn := range conns {
			_ = conn.Close()
		}
	})
	return l, conns
}

// While somebody else holds the address, Err says so; when the address is free, the listener stands again.
func TestADeadSocketIsBoundAgain(t *testing.T) {
	l, conns := open(t)
	var other net.Listener
	require.Eventually(t, func() bool { // the listener itself may be faster and take the address first
		l.Fail()
		ln, err := net.Listen("tcp", l.Addr().String())
		other = ln
		return err == nil
	}, 10*time.Second, time.Millisecond)
	require.Eventually(t, func() bool {
		return errors.Is(l.Err(), syscall.EADDRINUSE)
	}, 10*time.Second, time.Millisecond, "the reason is that of the bind")
	require.NoError(t, other.Close())
	require.Eventually(t, func() bool { return l.Err() == nil }, 10*time.Second, time.Millisecond)
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, (<-conns).Close())
}

func TestCloseEndsAPausingListener(t *testing.T) {
	l, conns := open(t)
	l.Fail()
	require.NoError(t, l.Close())
	_, more := <-conns
	assert.False(t, more)
	again, err := net.Listen("tcp", l.Addr().String())
	require.NoError(t, err, "the address is free")
	require.NoError(t, again.Close())
}

// crowded fails as a socket does while the process has no file descriptor left, then accepts.
type crowded struct {
	net.Listener
	fails int
}

func (c *crowded) Accept() (net.Conn, error) {
	if c.fails--; c.fails >= 0 {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: syscall.EMFILE}
	}
	return c.Listener.Accept()
}

func TestALackOfFileDescriptorsKeepsTheSocket(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	inner := &crowded{ln, 3}
	l := On(inner)
	defer l.Close()
	out, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	defer out.Close()
	in, err := l.Accept()
	require.NoError(t, err)
	require.NoError(t, in.Close())
	assert.Same(t, inner, l.ln)
	assert.NoError(t, l.Err())
}
