// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
)

// bodyBuffer is the size of the pooled buffers that large request bodies are
// copied through on their way to a connection, in bytes.
const bodyBuffer = 64 << 10

// conn counts what an HTTP/1 connection carries. It sits above TLS, so that
// alerts and handshakes do not count as parts of a request.
//
// net/http knows itself whether anything was written (transport.go,
// nothingWrittenError) but strips that knowledge from the error it returns.
type conn struct {
	net.Conn
	buffers *sync.Pool
	tls     *tls.ConnectionState // nil on plain connections

	written, read atomic.Int64

	// fault is the first error of reading or writing. When a write fails,
	// net/http closes the connection, and may then report that its own reader
	// found it closed.
	fault atomic.Pointer[error]
}

func (c *conn) note(err error) {
	if !errors.Is(err, net.ErrClosed) {
		c.fault.CompareAndSwap(nil, &err)
	}
}

func (c *conn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if n > 0 {
		c.written.Add(int64(n))
	}
	if err != nil {
		c.note(err)
	}
	return n, err
}

func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.read.Add(int64(n))
	}
	if err != nil {
		c.note(err)
	}
	return n, err
}

// ReadFrom takes the part of a request body that did not fit the write buffer.
// Bodies that can write themselves do, without a copy; others pass through a
// pooled buffer. Without this method net/http would allocate 32 KiB for each
// such request.
func (c *conn) ReadFrom(r io.Reader) (int64, error) {
	if limited, ok := r.(*io.LimitedReader); ok {
		if body, ok := limited.R.(io.WriterTo); ok {
			return c.writeBody(limited, body)
		}
	}
	buf := c.buffers.Get().(*[]byte)
	defer c.buffers.Put(buf)
	return io.CopyBuffer(writerOnly{c}, r, *buf)
}

// writeBody lets the body write itself, cut at the length that the request
// announces. net/http finds out about the rest, if there is one, and fails the
// request.
func (c *conn) writeBody(limited *io.LimitedReader, body io.WriterTo) (int64, error) {
	w := limitedWriter{conn: c, left: limited.N}
	_, err := body.WriteTo(&w)
	n := limited.N - w.left
	limited.N = w.left
	if errors.Is(err, errBodyTooLong) {
		err = nil
	}
	return n, err
}

var errBodyTooLong = errors.New("transport: body is longer than announced")

type limitedWriter struct {
	conn *conn
	left int64
}

func (w *limitedWriter) Write(p []byte) (int, error) {
	tooLong := int64(len(p)) > w.left
	if tooLong {
		p = p[:w.left]
	}
	n, err := w.conn.Write(p)
	w.left -= int64(n)
	if err == nil && tooLong {
		err = errBodyTooLong
	}
	return n, err
}

// WriteString keeps bodies of type strings.Reader from turning their whole text
// into bytes for Write.
func (w *limitedWriter) WriteString(s string) (int, error) {
	buf := w.conn.buffers.Get().(*[]byte)
	defer w.conn.buffers.Put(buf)
	written := 0
	for len(s) > 0 {
		n, err := w.Write((*buf)[:copy(*buf, s)])
		written += n
		if err != nil {
			return written, err
		}
		s = s[n:]
	}
	return written, nil
}

// writerOnly hides ReadFrom from io.CopyBuffer, which would call it again.
type writerOnly struct{ io.Writer }

// WriteBuffers writes parts with as few system calls as the connection allows. parts is used up.
func (w *limitedWriter) WriteBuffers(parts [][]byte) (int64, error) {
	total, tooLong := int64(0), false
	for i, p := range parts {
		if left := w.left - total; int64(len(p)) > left {
			parts, tooLong = parts[:i+1], true
			parts[i] = p[:left]
		}
		total += int64(len(parts[i]))
		if tooLong {
			break
		}
	}
	buffers := net.Buffers(parts)
	n, err := buffers.WriteTo(w.conn.Conn)
	if n > 0 {
		w.conn.written.Add(n)
	}
	w.left -= n
	if err != nil {
		w.conn.note(err)
		return n, err
	}
	if tooLong {
		err = errBodyTooLong
	}
	return n, err
}
