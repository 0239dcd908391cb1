// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"net"

	"github.com/pdkit/pdkit/transport/internal/rawsocket"
)

// NewListener returns a listener for a server of streams, whose TCP connections read and write at less cost. Where a
// gateway mostly waits for tokens, a chunk costs it 10 to 20 % less CPU time so (Linux on amd64 and arm64; elsewhere,
// and for other connections than TCP's, nothing changes). The transport's own connections to engines are such, too.
// For TLS, wrap it: tls.NewListener(transport.NewListener(l), config).
//
// The connections have the methods of a [net.TCPConn], and deadlines, Close and errors are the same, but they are of
// another type: who looks for an ability asserts its method.
//
// What is saved: Go's runtime wakes its monitoring thread (sysmon) by the first system call after each pause of the
// program, in case that the call blocks, and the thread then looks around every 20 µs for a while. These reads and
// writes never block, so the runtime is not told of them. The thread is still needed, to interrupt goroutines that
// compute for long; while there are such connections, a timer wakes it every 20 ms.
func NewListener(l net.Listener) net.Listener { return listener{l} }

type listener struct{ net.Listener }

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return rawsocket.New(c), nil
}
