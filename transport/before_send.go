// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync/atomic"
)

// BeforeSend adds a last check to requests that [Send] and [Retrier] send under the returned context. When a connection
// stands, right before the first byte is written, check(true) is called. If it returns an error, nothing is sent, and
// the request fails with an [*Error] (SentNothing, never tried again) that wraps it. A check looks at what may have
// become untrue while the connection was made, such as the lease of a KV handoff.
//
// A [Transport] calls check itself, under any wrapper. All other round trippers are observed through
// net/http/httptrace, whose hooks net/http's own transport calls for HTTP/1.1 and HTTP/2. If a round tripper reads the
// request's body before it has asked for a connection, check(false) is called first; for a round tripper that does not
// use httptrace that is the only call. check may block until the context ends, and may be called again for each further
// connection. It replaces an earlier check.
func BeforeSend(ctx context.Context, check func(connected bool) error) context.Context {
	return &checked{Context: ctx, check: check}
}

// Send sends req through rt under ctx (req's own context is not used), as rt.RoundTrip does. It makes sure that the
// check of [BeforeSend] is called, whatever rt is.
func Send(ctx context.Context, rt http.RoundTripper, req *http.Request) (*http.Response, error) {
	if t, ok := rt.(*Transport); ok {
		return t.send(ctx, req)
	}
	if g := checkOf(ctx); g != nil && g.try == nil {
		return g.send(ctx, rt, req)
	}
	if ctx != req.Context() {
		req = req.WithContext(ctx)
	}
	return rt.RoundTrip(req)
}

// checked is a context with a check.
type checked struct {
	context.Context
	check func(connected bool) error
	try   *try // nil until a round tripper is observed
}

type checkKey struct{}

// Value implements context.Context.
func (g *checked) Value(key any) any {
	if key == (checkKey{}) {
		return g
	}
	return g.Context.Value(key)
}

func checkOf(ctx context.Context) *checked {
	g, _ := ctx.Value(checkKey{}).(*checked)
	return g
}

// ask calls the check. g may be nil.
func (g *checked) ask(connected bool) error {
	if g == nil {
		return nil
	}
	err := g.check(connected)
	if g.try != nil {
		g.try.noteConnection(connected, err)
	}
	return err
}

// connecting says that the check will be called for a connection, so that reading the body need not call it. g may be
// nil.
func (g *checked) connecting() {
	if g != nil && g.try != nil {
		g.try.connecting.Store(true)
	}
}

// try is one request sent through a round tripper that is observed. Its hooks run in any goroutine of the round
// tripper.
type try struct {
	checked    // the request's context
	cancel     context.CancelCauseFunc
	trace      httptrace.ClientTrace
	connecting atomic.Bool // the round tripper has asked for a connection
	bodyRead   atomic.Bool // check(false) has returned nil
	connected  atomic.Bool // check(true) has returned nil
	refused    atomic.Pointer[error]
	conn       atomic.Pointer[net.Conn] // the connection for which the check returned an error
	body       io.ReadCloser            // the response's body
}

// send sends req through rt, with the check.
func (g *checked) send(ctx context.Context, rt http.RoundTripper, req *http.Request) (*http.Response, error) {
	watched, cancel := context.WithCancelCause(ctx)
	t := &try{checked: checked{Context: watched, check: g.check}, cancel: cancel}
	t.checked.try = t
	t.trace.GetConn, t.trace.GotConn, t.trace.WroteHeaders = t.getConn, t.gotConn, t.wroteHeaders
	out := req.WithContext(httptrace.WithClientTrace(&t.checked, &t.trace))
	if hasBody(req) {
		out.Body = &gatedBody{ReadCloser: req.Body, try: t}
		if req.GetBody != nil {
			out.GetBody = func() (io.ReadCloser, error) {
				body, err := req.GetBody()
				return &gatedBody{ReadCloser: body, try: t}, err
			}
		}
	} else {
		t.bodyRead.Store(true) // a round tripper without httptrace gives no sign before it sends
	}
	resp, err := rt.RoundTrip(out)
	if refused := t.refused.Load(); refused != nil {
		if err == nil {
			_ = resp.Body.Close() // the response is the wrapper's own, since the request was not sent
		}
		err = &Error{Sent: SentNothing, Kind: requestKind(ctx, *refused), Err: *refused, final: true}
	} else if err != nil && !t.connected.Load() && (t.connecting.Load() || !t.bodyRead.Load()) {
		unsent := *asError(ctx, err)
		unsent.Sent = SentNothing
		err = &unsent
	}
	if err != nil {
		t.cancel(err)
		return nil, err
	}
	t.body, resp.Body = resp.Body, t
	return resp, nil
}

func (t *try) noteConnection(connected bool, err error) {
	switch {
	case err != nil:
		t.refused.CompareAndSwap(nil, &err)
		t.cancel(err) // HTTP/2 looks at the context once more before it writes a head
	case connected:
		t.connected.Store(true)
	default:
		t.bodyRead.Store(true)
	}
}

func (t *try) getConn(string) { t.checked.connecting() }

func (t *try) gotConn(info httptrace.GotConnInfo) {
	if t.ask(true) != nil {
		conn := info.Conn
		t.conn.Store(&conn)
	}
}

// wroteHeaders closes an HTTP/1.1 connection for which the check returned an error, since net/http goes on writing to
// it. The end of the head is still in net/http's buffer. HTTP/2 does not come here, so no other request shares the
// connection.
func (t *try) wroteHeaders() {
	if conn := t.conn.Load(); conn != nil {
		_ = (*conn).Close()
	}
}

// Read reads the response's body.
func (t *try) Read(p []byte) (int, error) { return t.body.Read(p) }

// Close closes the response's body, and frees the context.
func (t *try) Close() error {
	err := t.body.Close()
	t.cancel(nil)
	return err
}

// gatedBody calls the check at its first read, unless the round tripper has asked for a connection by then.
type gatedBody struct {
	io.ReadCloser
	try  *try
	read bool
}

func (b *gatedBody) admit() error {
	if b.read || b.try.connecting.Load() {
		return nil
	}
	b.read = true
	return b.try.ask(false)
}

// Read implements io.Reader.
func (b *gatedBody) Read(p []byte) (int, error) {
	if err := b.admit(); err != nil {
		return 0, err
	}
	return b.ReadCloser.Read(p)
}

// WriteTo keeps the WriterTo of a body.
func (b *gatedBody) WriteTo(w io.Writer) (int64, error) {
	if err := b.admit(); err != nil {
		return 0, err
	}
	return io.Copy(w, b.ReadCloser)
}
