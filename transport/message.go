// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
)

// bodyBuffer is the size of the pooled buffers that large bodies without a WriteTo method are copied through, in bytes.
const bodyBuffer = 64 << 10

var (
	errBodyTooLong  = errors.New("transport: the body is longer than announced")
	errBodyTooShort = errors.New("transport: the body is shorter than announced")
)

// message is a request ready to be written: its head and, if both fit the write buffer, its body, so that one system
// call writes both.
type message struct {
	t      *Transport
	pooled *[]byte
	text   []byte
	body   io.ReadCloser // the part that is not in text; nil if there is none
	length int64         // of body
	last   bool          // the connection ends after this request
}

// make reads a small body whole, before there is a connection that would have to wait for it. The caller frees the
// message, whatever make returns, which closes the request's body.
func (m *message) make(req *http.Request) (err error) {
	m.pooled = m.t.writeBuffers.Get().(*[]byte)
	if m.body, m.length, err = bodyOf(req); err != nil {
		return err
	}
	if m.text, m.last, err = appendHead((*m.pooled)[:0], req, m.length); err != nil {
		return err
	}
	if m.body != nil && int64(len(m.text))+m.length < int64(len(*m.pooled)) { // one byte is left for ended
		return m.join()
	}
	return nil
}

// bodyOf returns a request's body and its length; nil and 0 if it has none. It reads a body of unknown length into
// memory.
func bodyOf(req *http.Request) (io.ReadCloser, int64, error) {
	switch {
	case !hasBody(req):
		return nil, 0, nil
	case req.ContentLength > 0:
		return req.Body, req.ContentLength, nil
	}
	defer closeBody(req)
	all, err := io.ReadAll(req.Body)
	if err != nil || len(all) == 0 {
		return nil, 0, err
	}
	return io.NopCloser(bytes.NewReader(all)), int64(len(all)), nil
}

// join appends the body to the head.
func (m *message) join() error {
	body := m.body
	m.body = nil
	defer func() { _ = body.Close() }()
	head := len(m.text)
	m.text = m.text[:head+int(m.length)]
	if _, err := io.ReadFull(body, m.text[head:]); err != nil {
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			err = errBodyTooShort
		}
		return err
	}
	return m.ended(body)
}

// ended checks that a body has no more bytes than announced. It reads into the buffer's last byte, which no message
// needs: a variable here would be an allocation for each request.
func (m *message) ended(body io.Reader) error {
	last := (*m.pooled)[len(*m.pooled)-1:]
	for range 100 {
		switch n, err := body.Read(last); {
		case n > 0:
			return errBodyTooLong
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
	}
	return io.ErrNoProgress
}

// free closes the body and gives the buffer back.
func (m *message) free() {
	if m.body != nil {
		_ = m.body.Close()
		m.body = nil
	}
	if m.pooled != nil {
		m.t.writeBuffers.Put(m.pooled)
		m.pooled, m.text = nil, nil
	}
}

// writeTo writes the message to c, and frees it if that succeeds. It returns connErr or bodyErr; only after a failure
// of the connection may there be a response.
func (m *message) writeTo(c *conn) (connErr, bodyErr error) {
	if m.body == nil {
		n, err := c.rw.Write(m.text)
		c.written += int64(max(n, 0))
		return err, nil
	}
	w := &bodyWriter{c: c, head: m.text, left: m.length}
	if body, ok := m.body.(io.WriterTo); ok {
		_, bodyErr = body.WriteTo(w)
	} else {
		bodyErr = m.copyTo(w)
	}
	switch {
	case w.err != nil:
		return w.err, nil
	case bodyErr != nil:
		return nil, bodyErr
	case w.left > 0:
		return nil, errBodyTooShort
	}
	return nil, m.ended(m.body)
}

// copyTo copies the body through a pooled buffer, together with the head.
func (m *message) copyTo(w *bodyWriter) error {
	pooled := m.t.bodyBuffers.Get().(*[]byte)
	defer m.t.bodyBuffers.Put(pooled)
	buf := *pooled
	for w.left > 0 {
		n, err := io.ReadFull(m.body, buf[:min(int64(len(buf)), w.left)])
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return errBodyTooShort
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// bodyWriter writes a body to a connection. It writes the head with the first bytes of the body, and cuts the body at
// its announced length.
type bodyWriter struct {
	c    *conn
	head []byte
	left int64
	err  error // of the connection
}

// Write implements io.Writer.
func (w *bodyWriter) Write(p []byte) (int, error) {
	n, err := w.WriteBuffers([][]byte{p})
	return int(n), err
}

// WriteString spares bodies of type strings.Reader the conversion of their whole text into bytes.
func (w *bodyWriter) WriteString(s string) (int, error) {
	pooled := w.c.t.bodyBuffers.Get().(*[]byte)
	defer w.c.t.bodyBuffers.Put(pooled)
	written := 0
	for len(s) > 0 {
		n, err := w.Write((*pooled)[:copy(*pooled, s)])
		written += n
		if err != nil {
			return written, err
		}
		s = s[n:]
	}
	return written, nil
}

// WriteBuffers writes parts with as few system calls as the connection allows, on TCP with one. parts is empty
// afterwards.
func (w *bodyWriter) WriteBuffers(parts [][]byte) (int64, error) {
	if w.err != nil {
		return 0, w.err
	}
	head := int64(len(w.head))
	buffers := make(net.Buffers, 0, len(parts)+1)
	if head > 0 {
		buffers = append(buffers, w.head)
		w.head = nil
	}
	left, tooLong := w.left, false
	for _, p := range parts {
		if int64(len(p)) > left {
			p, tooLong = p[:left], true
		}
		if left -= int64(len(p)); len(p) > 0 {
			buffers = append(buffers, p)
		}
	}
	n, err := buffers.WriteTo(w.c.rw)
	n = max(n, 0)
	w.c.written += n
	n = max(n-head, 0)
	w.left -= n
	switch {
	case err != nil:
		w.err = err
	case tooLong:
		err = errBodyTooLong
	}
	return n, err
}
