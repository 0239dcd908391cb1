// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"crypto/tls"
	"net"
	"os"
	"time"
)

// conn is one HTTP/1.1 connection. It has no goroutine: one request at a time
// owns it, or the pool does, and whoever owns it reads and writes.
type conn struct {
	raw net.Conn // what was dialed
	rw  net.Conn // raw, or TLS over it
	tls *tls.ConnectionState
	key hostKey
	t   *Transport

	quietCheck func() bool // nothing has arrived; nil where nobody can tell
	abort      func()      // ends reads and writes at once, from any goroutine

	reused bool        // has served a request before
	since  time.Time   // when it became idle
	stop   func() bool // takes abort back from the request's context; nil between requests

	written int64 // bytes of the running request that were handed over
	read    int64 // bytes of its response, interim ones included

	buf    []byte  // nil when nothing is in it
	r, w   int     // unread bytes are buf[r:w]
	pooled *[]byte // buf, if it is of the transport's pool: one for a large head is not
}

func (t *Transport) newConn(key hostKey, raw net.Conn, secured *tls.Conn) *conn {
	c := &conn{raw: raw, rw: raw, key: key, t: t, quietCheck: newQuietCheck(raw)}
	// The socket under TLS is closed without TLS's close_notify alert, which
	// would wait for a write that hangs.
	c.abort = func() { _ = raw.Close() }
	if secured != nil {
		state := secured.ConnectionState()
		c.rw, c.tls = secured, &state
	}
	return c
}

// begin puts the connection under ctx for one request.
func (c *conn) begin(ctx context.Context) {
	c.written, c.read = 0, 0
	if ctx.Done() != nil {
		c.stop = context.AfterFunc(ctx, c.abort)
	}
}

// end takes the connection back from its request, for the next one if keep is
// set and nothing speaks against it. Nobody may read from it any more.
func (c *conn) end(keep bool) {
	if c.stop != nil {
		if !c.stop() {
			keep = false // the context ended: the socket is closed, or about to be
		}
		c.stop = nil
	}
	if c.w > c.r {
		keep = false // more than the response came
	}
	c.release()
	if !keep || !c.tlsQuiet() {
		c.abort()
		return
	}
	c.reused = true
	c.t.pool.put(c)
}

// close ends an idle connection.
func (c *conn) close() { _ = c.rw.Close() }

// quiet reports whether an idle connection may be used: neither its end nor
// any byte has arrived.
func (c *conn) quiet() bool { return c.quietCheck == nil || c.quietCheck() }

// tlsQuiet looks for what TLS has taken off the socket beyond the response, where
// quietCheck cannot see it. With a deadline in the past the socket itself is not
// read.
func (c *conn) tlsQuiet() bool {
	if c.tls == nil {
		return true
	}
	if c.rw.SetReadDeadline(longAgo) != nil {
		return false
	}
	var one [1]byte
	n, err := c.rw.Read(one[:])
	return n == 0 && isTimeout(err) && c.rw.SetReadDeadline(time.Time{}) == nil
}

var longAgo = time.Unix(1, 0)

// fill reads once into the buffer, which is taken from the pool if there is
// none.
func (c *conn) fill() (int, error) {
	switch {
	case c.buf == nil:
		c.pooled = c.t.readBuffers.Get().(*[]byte)
		c.buf, c.r, c.w = *c.pooled, 0, 0
	case c.r == c.w:
		c.r, c.w = 0, 0
	case c.w == len(c.buf):
		larger := make([]byte, 2*len(c.buf))
		n := copy(larger, c.buf[c.r:c.w])
		c.release()
		c.buf, c.r, c.w = larger, 0, n
	}
	n, err := c.readInto(c.buf[c.w:])
	c.w += n
	return n, err
}

// readInto reads once. An error that comes with bytes is left for the next
// read, which meets it again.
func (c *conn) readInto(p []byte) (int, error) {
	n, err := c.rw.Read(p)
	if n > 0 {
		c.read += int64(n)
		return n, nil
	}
	if err == nil {
		err = os.ErrInvalid // an io.Reader that does nothing is not waited for
	}
	return 0, err
}

func (c *conn) buffered() []byte { return c.buf[c.r:c.w] }

// take gives the buffer back once it is empty: a stream that waits for its next
// token holds none.
func (c *conn) take(n int) {
	c.r += n
	if c.r == c.w {
		c.release()
	}
}

func (c *conn) release() {
	if c.pooled != nil {
		c.t.readBuffers.Put(c.pooled)
		c.pooled = nil
	}
	c.buf, c.r, c.w = nil, 0, 0
}
