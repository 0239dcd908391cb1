// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"crypto/tls"
	"net"
	"os"
	"time"

	"github.com/pdkit/pdkit/transport/internal/rawsocket"
)

// conn is one HTTP/1.1 connection. It has no goroutine. One request or the pool owns it; only the owner reads and
// writes.
type conn struct {
	raw  net.Conn               // the dialed connection
	rw   net.Conn               // raw, or TLS over it
	lazy rawsocket.PooledReader // rw, if it can wait without a buffer; else nil
	tls  *tls.ConnectionState
	key  hostKey
	t    *Transport

	quietCheck func() bool // reports that nothing has arrived; nil if the system cannot tell
	abort      func()      // ends reads and writes at once; any goroutine may call it

	reused   bool        // it has carried a request before
	unpaused int         // requests since its last pause (minPause), but for the first
	paused   time.Time   // when that was
	id       string      // the last request's X-Request-Id
	echo     echo        // of its requests' ids
	begun    time.Time   // when the last request got it
	long     bool        // it had it for long
	since    time.Time   // when it became idle
	ends     time.Time   // it serves no request that begins later; zero: no limit
	stop     func() bool // detaches abort from the request's context; nil between requests

	written int64 // bytes of the running request given to the socket
	read    int64 // bytes of its response, interim ones included
	failed  error // of a read that waited, for all that follow: the connection is of no use any more

	buf    []byte  // nil when empty
	r, w   int     // unread bytes are buf[r:w]
	pooled *[]byte // buf, if it came from the transport's pool; a buffer for a large head did not
}

func (t *Transport) newConn(key hostKey, raw net.Conn, secured *tls.Conn) *conn {
	now := time.Now()
	c := &conn{raw: raw, rw: raw, key: key, t: t, paused: now, begun: now, ends: t.options.connectionEnds(),
		quietCheck: rawsocket.QuietCheck(raw)}
	// abort closes the socket under TLS without TLS's close_notify alert, which would wait for a write that hangs.
	c.abort = func() { _ = raw.Close() }
	if secured != nil {
		state := secured.ConnectionState()
		c.rw, c.tls = secured, &state
	} else {
		c.lazy, _ = raw.(rawsocket.PooledReader)
	}
	return c
}

// begin binds the connection to ctx for one request.
func (c *conn) begin(ctx context.Context) {
	c.written, c.read = 0, 0
	if ctx.Done() != nil {
		c.stop = context.AfterFunc(ctx, c.abort)
	}
}

// end unbinds the connection from its request, and gives it to the pool if keep is true and nothing prevents it. Nobody
// may read from it afterwards.
func (c *conn) end(keep bool) {
	if c.stop != nil {
		if !c.stop() {
			keep = false // the context ended, so the socket is closed or will be
		}
		c.stop = nil
	}
	if c.w > c.r || c.failed != nil {
		if keep && unasked(c.buffered()) {
			c.t.suspect(c.key)
		}
		keep = false // the engine sent more than the response, or the connection's end
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

// quiet reports whether an idle connection may be used: nothing has arrived on it, not even its end.
func (c *conn) quiet() bool { return c.quietCheck == nil || c.quietCheck() }

// closeIdle closes a connection that was idle. If bytes have arrived that nobody asked for, its engine is a suspect.
func (c *conn) closeIdle() {
	defer c.close()
	if c.quiet() {
		return
	}
	first := rawsocket.Arrived(c.raw)
	if len(first) > 0 && c.tls != nil {
		// They may be an alert or a session ticket. What has come whole is read without a wait.
		_ = c.rw.SetReadDeadline(time.Now().Add(time.Millisecond))
		first = first[:cap(first)]
		n, _ := c.rw.Read(first)
		first = first[:max(n, 0)]
	}
	if unasked(first) {
		c.t.suspect(c.key)
	}
}

// tlsQuiet reports whether TLS holds no bytes that it has read beyond the response, which quietCheck cannot see.
// Because of the deadline in the past it does not read the socket.
func (c *conn) tlsQuiet() bool {
	if c.tls == nil {
		return true
	}
	if c.rw.SetReadDeadline(longAgo) != nil {
		return false
	}
	var first [16]byte
	n, err := c.rw.Read(first[:])
	if n > 0 && unasked(first[:n]) {
		c.t.suspect(c.key)
	}
	return n == 0 && isTimeout(err) && c.rw.SetReadDeadline(time.Time{}) == nil
}

var longAgo = time.Unix(1, 0)

// fill reads once into the buffer. It takes a buffer from the pool if there is none.
func (c *conn) fill() (int, error) {
	switch {
	case c.buf == nil && c.lazy != nil && c.failed == nil:
		pooled, n, err := c.lazy.ReadPooled(&c.t.readBuffers)
		if err != nil {
			return 0, err
		}
		c.pooled, c.buf, c.r, c.w = pooled, *pooled, 0, n
		c.read += int64(n)
		return n, nil
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

// wait returns when there is something to read, or an error of reading, if it can do so without a buffer meanwhile.
func (c *conn) wait() {
	if c.lazy != nil && c.w == c.r {
		_, c.failed = c.fill()
	}
}

// readInto reads once. If an error comes with bytes, it returns only the bytes; the next read meets the error again.
func (c *conn) readInto(p []byte) (int, error) {
	if c.failed != nil {
		return 0, c.failed
	}
	n, err := c.rw.Read(p)
	if n > 0 {
		c.read += int64(n)
		return n, nil
	}
	if err == nil {
		err = os.ErrInvalid // do not wait for an io.Reader that does nothing
	}
	return 0, err
}

func (c *conn) buffered() []byte { return c.buf[c.r:c.w] }

// take marks n buffered bytes as used. An empty buffer goes back to the pool, so that a stream that waits for its next
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
