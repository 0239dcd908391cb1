// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"net"
	"net/http/httptrace"
)

// watch follows one request to the connection that it was given, or to several: net/http itself sends a request again
// if nothing of it was written to a reused connection.
//
// Only GotConn is hooked. net/http calls it in the goroutine of RoundTrip, and never after RoundTrip has returned. So a
// watch may be used again for the next request although net/http's own goroutines still hold its trace: they only read
// hooks that stay nil.
type watch struct {
	trace httptrace.ClientTrace

	conn        *counted // nil before the first connection and on HTTP/2
	wrote, read int64    // conn's counters when the request got it
	connected   bool
	reused      bool
	request     int64 // the request's number on conn
	sent        bool  // something was sent on an earlier connection, or on a connection without counters
}

func newWatch() *watch {
	w := new(watch)
	w.trace.GotConn = w.gotConn
	return w
}

func (w *watch) gotConn(info httptrace.GotConnInfo) {
	w.sent = w.wroteAny()
	w.connected = true
	w.reused = info.Reused
	c, counted := info.Conn.(*counted)
	if !counted {
		w.conn, w.sent = nil, true
		return
	}
	w.conn, w.wrote, w.read, w.request = c, c.written.Load(), c.read.Load(), c.requests.Add(1)
}

func (w *watch) wroteAny() bool {
	return w.sent || w.conn != nil && w.conn.written.Load() != w.wrote
}

func (w *watch) readAny() bool {
	return w.conn != nil && w.conn.read.Load() != w.read
}

func (w *watch) reset() {
	w.conn, w.wrote, w.read = nil, 0, 0
	w.connected, w.reused, w.sent = false, false, false
}

// closedIdle is the text of net/http's error, which has no exported value, for a connection that the engine closes
// before the request is written: an idle one, or a new one.
const closedIdle = "http: server closed idle connection"

// failure turns an error of net/http into this package's. By then net/http's writer has stopped
// (persistConn.mapRoundTripError waits for it), so the count is final.
func (w *watch) failure(ctx context.Context, err error) *Error {
	e := &Error{Sent: SentNothing, Reused: w.reused, Err: err}
	if w.wroteAny() {
		e.Sent = SentMaybe
	}
	if ce, ok := errors.AsType[*connectError](err); ok && ctx.Err() == nil {
		e.Kind = ce.kind
		e.final = rejectsCertificate(err)
		return e
	}
	e.Kind = requestKind(ctx, err)
	if e.Kind == KindOther && errors.Is(err, net.ErrClosed) && w.conn != nil {
		if fault := w.conn.fault.Load(); fault != nil {
			e.Kind = kindOf(*fault)
		}
	}
	switch {
	case !w.connected:
		// It was neither a failed dial nor a context's end: net/http refused the request itself, and would do so again.
		e.final = true
	case e.Kind == KindTLS:
		// With TLS 1.3 the client is done before the engine has judged its certificate, so the verdict comes as an
		// alert in place of a response. An engine reads no request before that verdict (RFC 8446, 4.4.4).
		e.final = true
		if !w.reused && !w.readAny() {
			e.Sent = SentNothing
		}
	case e.Kind != KindOther:
	case e.Sent == SentNothing && (w.reused || err.Error() == closedIdle):
		e.Kind = KindEOF
	case w.readAny():
		e.Kind = KindProtocol
	default:
		// Nothing came from the engine: the request's own body failed, or did not have the announced length.
		e.final = true
	}
	return e
}
