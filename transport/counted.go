// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// counted counts what a connection of net/http carries. It sits above TLS, so that alerts and handshakes do not count
// as parts of a request.
//
// net/http knows itself whether anything was written (transport.go, nothingWrittenError) but strips that knowledge from
// the error it returns.
type counted struct {
	net.Conn
	tls     *tls.ConnectionState // nil on plain connections
	suspect func()               // makes the engine a suspect
	ends    time.Time            // see conn

	written, read atomic.Int64

	requests atomic.Int64 // that have got the connection
	running  atomic.Int64 // the number of the one that was begun to be written; 0 after its response

	mu   sync.Mutex
	echo echo // of its requests' ids

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
	for begun := false; !begun; {
		was := c.running.Load()
		if was == closing {
			return 0, net.ErrClosed
		}
		begun = c.running.CompareAndSwap(was, c.requests.Load())
	}
	n, err := c.Conn.Write(p)
	c.written.Add(int64(max(n, 0)))
	if err != nil {
		c.note(err)
	}
	return n, err
}

// misplaced reports whether a response is to another request, by its header or by the first bytes of its body. The next
// request may have the connection already.
func (c *counted) misplaced(id string, header http.Header, body []byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return header != nil && c.echo.misplacedHead(id, header) || body != nil && c.echo.misplacedBody(id, body)
}

// closing is the value of counted.running from which on nothing is written.
const closing = -1

// end is called after the response, when another request may have the connection already. If the connection is too
// old, it closes it; a request that was given it and not written then goes out on another one.
func (c *counted) end(request int64) {
	if !tooOld(c.ends, time.Now()) {
		c.running.CompareAndSwap(request, 0)
	} else if c.running.CompareAndSwap(request, closing) {
		_ = c.Close()
	}
}

// Read reads from the engine. net/http always reads, also while no request runs. What comes then ends the connection;
// net/http would also write its first bytes, which may be a client's response, to the program's log.
func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 && c.running.Load() == 0 {
		if unasked(p[:n]) {
			c.suspect()
		}
		return 0, io.EOF
	}
	c.read.Add(int64(max(n, 0)))
	if err != nil {
		c.note(err)
	}
	return n, err
}
