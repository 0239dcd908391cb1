// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/url"
	"time"
)

// roundTrip sends a request over this package's own connections.
func (t *Transport) roundTrip(ctx context.Context, req *http.Request) (*http.Response, error) {
	if err := checkTarget(req); err != nil {
		closeBody(req)
		return nil, &Error{Sent: SentNothing, Kind: KindOther, Err: err, final: true}
	}
	g := checkOf(ctx)
	g.connecting()
	m := message{t: t}
	defer m.free()
	if err := m.make(req); err != nil {
		return nil, &Error{Sent: SentNothing, Kind: requestKind(ctx, err), Err: err, final: true}
	}
	for {
		c, err := t.connection(ctx, req)
		if err != nil {
			return nil, err
		}
		if err := g.ask(true); err != nil {
			c.begin(ctx)
			c.end(true) // nothing was written, so the next request may use it
			return nil, &Error{Sent: SentNothing, Kind: KindOther, Err: err, final: true}
		}
		resp, failed := c.roundTrip(ctx, req, &m)
		if failed == nil {
			return resp, nil
		}
		died := failed.Reused && !failed.final && c.read == 0 && ctx.Err() == nil
		if died {
			// What killed an idle connection unseen, such as the host's crash or a firewall that forgot it, has
			// likely killed the engine's other idle ones too.
			t.pool.drop(c.key)
		}
		if failed.Reused && failed.Kind == KindProtocol {
			t.suspect(c.key)
		}
		if !died || failed.Sent != SentNothing || !m.rewind(req) {
			return nil, failed
		}
	}
}

// connection returns an idle connection, or opens one.
func (t *Transport) connection(ctx context.Context, req *http.Request) (*conn, error) {
	if ctx.Err() != nil {
		cause := context.Cause(ctx)
		return nil, &Error{Sent: SentNothing, Kind: requestKind(ctx, cause), Err: cause, final: true}
	}
	key := keyOf(req)
	if !wantsNew(ctx) && !t.suspects.has(key) {
		if c := t.pool.take(key); c != nil {
			return c, nil
		}
	}
	raw, secured, err := t.dialApart(ctx, address(req), key.secure)
	if err == nil {
		return t.newConn(key, raw, secured), nil
	}
	e := &Error{Sent: SentNothing, Err: err}
	if ctx.Err() != nil {
		e.Err = context.Cause(ctx)
		e.Kind, e.final = requestKind(ctx, e.Err), true
		return nil, e
	}
	if ce, ok := errors.AsType[*connectError](err); ok {
		e.Kind = ce.kind
	}
	e.final = rejectsCertificate(err)
	return nil, e
}

// address returns the host and port to dial.
func address(req *http.Request) string { return keyOf(req).address() }

func (k hostKey) address() string {
	u := url.URL{Host: k.host}
	if u.Port() != "" {
		return k.host
	}
	port := "80"
	if k.secure {
		port = "443"
	}
	return net.JoinHostPort(u.Hostname(), port)
}

// rewind prepares the message for another connection. It returns false if the body cannot be read again.
func (m *message) rewind(req *http.Request) bool {
	if m.body == nil {
		return true // the whole message is in the buffer
	}
	if req.GetBody == nil {
		return false
	}
	body, err := req.GetBody()
	if err != nil {
		return false
	}
	_ = m.body.Close()
	m.body = body
	return true
}

// roundTrip runs one request. Afterwards the response's body owns the connection, or the connection is closed.
func (c *conn) roundTrip(ctx context.Context, req *http.Request, m *message) (*http.Response, *Error) {
	reused := c.reused
	c.begin(ctx)
	c.id = idOf(req)
	h, whole, err := c.converse(req, m)
	if err == nil && (c.echo.misplacedHead(c.id, h.header) ||
		!whole && reused && h.code < http.StatusMultipleChoices) { // no engine serves half a request
		err = errMisplaced
	}
	if err != nil {
		failed := c.failure(ctx, err)
		c.end(false)
		return nil, failed
	}
	resp := &http.Response{
		Status: h.status, StatusCode: h.code, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: h.minor,
		Header: h.header, ContentLength: h.told, Trailer: h.trailer, Close: h.close, Request: req, TLS: c.tls,
	}
	if h.minor == 0 {
		resp.Proto = "HTTP/1.0"
	}
	if h.chunked {
		resp.TransferEncoding = chunkedEncoding
	}
	keep := whole && !h.close && !m.last
	if h.length == 0 {
		resp.Body = http.NoBody
		c.end(keep)
		return resp, nil
	}
	b := &body{resp: resp}
	b.c, b.abort, b.ctx, b.reused, b.keep, b.left, b.chunked = c, c.abort, ctx, reused, keep, h.length, h.chunked
	resp.Body = b
	return resp, nil
}

var chunkedEncoding = []string{"chunked"}

// requestFault is a failure of the request's own body.
type requestFault struct{ error }

// Unwrap returns the body's error.
func (f requestFault) Unwrap() error { return f.error }

// failure returns the *Error for err. It looks at the connection's state, so call it before the connection's end.
func (c *conn) failure(ctx context.Context, err error) *Error {
	e := &Error{Sent: SentNothing, Reused: c.reused, Err: err}
	if c.written > 0 {
		e.Sent = SentMaybe
	}
	_, fault := errors.AsType[requestFault](err)
	if fault {
		e.Err = errors.Unwrap(err)
		err = e.Err
	}
	e.Kind = requestKind(ctx, err)
	switch {
	case ctx.Err() != nil:
		e.Err = context.Cause(ctx)
	case fault:
		e.final = true
	case e.Kind == KindTLS:
		// With TLS 1.3 the client is done before the engine has judged its certificate, so the verdict comes as an
		// alert in place of a response. An engine reads no request before that verdict (RFC 8446, 4.4.4).
		e.final = true
		if !c.reused && c.read == 0 {
			e.Sent = SentNothing
		}
	case e.Kind == KindOther && c.read > 0:
		e.Kind = KindProtocol
	}
	return e
}

// lastWords is how long the transport waits for the response of an engine that broke off a request.
const lastWords = time.Second

// converse sends the message and reads the response's head. whole is true if the engine was sent everything.
func (c *conn) converse(req *http.Request, m *message) (h *head, whole bool, err error) {
	if m.body != nil {
		return c.converseLong(req, m)
	}
	connErr, _ := m.writeTo(c)
	return c.answer(req, m, connErr)
}

// answer reads the head of the response to a message that was written whole, or, with connErr, was not.
func (c *conn) answer(req *http.Request, m *message, connErr error) (h *head, whole bool, err error) {
	switch {
	case connErr == nil:
		m.free()
		h, err = c.readHead(methodOf(req))
		return h, true, err
	case c.written == 0 && c.reused:
		return nil, false, connErr
	}
	h, err = c.lastWords(methodOf(req), connErr)
	return h, false, err
}

// lastWords reads the response of an engine that no longer reads the request, because the request is too large or
// refused. It returns writeErr if there is none.
func (c *conn) lastWords(method string, writeErr error) (*head, error) {
	if c.rw.SetReadDeadline(time.Now().Add(lastWords)) != nil {
		return nil, writeErr
	}
	h, err := c.readHead(method)
	if err == nil {
		err = c.rw.SetReadDeadline(time.Time{})
	}
	if err != nil && !isAlert(err) {
		err = writeErr
	}
	return h, err
}
