// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"crypto/tls"
	"errors"
	"net"
	"sync/atomic"
)

// counted counts what a connection of net/http carries. It sits above TLS, so that alerts and handshakes do not count
// as parts of a request.
//
// net/http knows itself whether anything was written (transport.go, nothingWrittenError) but strips that knowledge from
// the error it returns.
type counted struct {
	net.Conn
	tls *tls.ConnectionState // nil on plain connections

	written, read atomic.Int64

	// fault is the first error of reading or writing. When a write fails, net/http closes the connection, and may then
	// report that its own reader found it closed.
	fault atomic.Pointer[error]
}

func (c *counted) note(err error) {
	if !errors.Is(err, net.ErrClosed) {
		c.fault.CompareAndSwap(nil, &err)
	}
}

func (c *counted) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.written.Add(int64(max(n, 0)))
	if err != nil {
		c.note(err)
	}
	return n, err
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.read.Add(int64(max(n, 0)))
	if err != nil {
		c.note(err)
	}
	return n, err
}
