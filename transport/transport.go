// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"crypto/tls"
	"net/http"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
)

// Transport sends requests to engines. It is an [http.RoundTripper], safe for
// concurrent use, and follows no redirect, asks for and decodes no compression,
// keeps no cookies and ignores the proxy variables of the environment.
//
// Connections serve again once an answer's body was read to its end. A request
// body that does not fit the write buffer goes to the connection by its own
// WriteTo method if it has one, and then is not copied on the way.
//
// net/http may send a request a second time by itself, on another connection:
// always only when nothing of it was written, or when the method is one of GET,
// HEAD, OPTIONS and TRACE, or when it carries an Idempotency-Key header. Leave
// that header out of requests that must not run twice.
//
// There is no limit on the time an answer takes: that is the context's
// business.
type Transport struct {
	options    Options
	tls        *tls.Config
	plainHTTP2 bool
	base       *http.Transport
	closed     atomic.Bool
	watches    sync.Pool // *watch
	buffers    sync.Pool // *[]byte of bodyBuffer bytes
}

// New returns a Transport; nil options are allowed. Close it when done.
func New(options *Options) *Transport {
	t := &Transport{options: options.withDefaults()}
	t.watches.New = func() any { return newWatch() }
	t.buffers.New = func() any {
		b := make([]byte, bodyBuffer)
		return &b
	}

	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	if t.options.Protocols != nil {
		*protocols = *t.options.Protocols
	}
	t.plainHTTP2 = protocols.UnencryptedHTTP2() && !protocols.HTTP1()
	t.tls = clientTLS(t.options.TLS, protocols)

	t.base = &http.Transport{
		DialContext:            t.dialPlain,
		DialTLSContext:         t.dialTLS,
		TLSClientConfig:        t.tls,
		DisableCompression:     true,
		MaxIdleConnsPerHost:    t.options.MaxIdlePerHost,
		IdleConnTimeout:        max(t.options.IdleTimeout, 0),
		ReadBufferSize:         t.options.ReadBuffer,
		WriteBufferSize:        t.options.WriteBuffer,
		MaxResponseHeaderBytes: t.options.MaxResponseHeaderBytes,
		Protocols:              protocols,
	}
	return t
}

// clientTLS returns a copy of config (nil allowed) fit for this package's own
// handshakes.
func clientTLS(config *tls.Config, protocols *http.Protocols) *tls.Config {
	out := new(tls.Config)
	if config != nil {
		out = config.Clone()
	}
	out.MinVersion = max(out.MinVersion, tls.VersionTLS12)
	out.NextProtos = nil
	if protocols.HTTP2() {
		out.NextProtos = append(out.NextProtos, "h2")
	}
	if protocols.HTTP1() {
		out.NextProtos = append(out.NextProtos, "http/1.1")
	}
	return out
}

// RoundTrip sends one request. Answers of any status are answers, not errors.
// Errors are of type [*Error], those of reading the answer's body included. The
// request is not changed, and its body always closed.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	return t.send(req.Context(), req)
}

// send is RoundTrip under a context of the caller's choice.
func (t *Transport) send(ctx context.Context, req *http.Request) (*http.Response, error) {
	if t.closed.Load() {
		closeBody(req)
		return nil, &Error{Sent: NotSent, Kind: Other, Err: ErrClosed, final: true}
	}
	w := t.watches.Get().(*watch)
	pooled := true
	if httptrace.ContextClientTrace(ctx) != nil {
		// The two traces are merged, which changes ours for good.
		w, pooled = newWatch(), false
	}
	resp, err := t.base.RoundTrip(req.WithContext(httptrace.WithClientTrace(ctx, &w.trace)))
	if t.closed.Load() {
		// Close came while this request was under way: its connection must not
		// stay behind.
		t.base.CloseIdleConnections()
	}
	if err != nil {
		err = w.failure(ctx, err)
	} else {
		resp.Request = req
		if resp.TLS == nil && w.conn != nil {
			resp.TLS = w.conn.tls
		}
		wrapBody(ctx, resp, w.reused)
	}
	if pooled {
		w.reset()
		t.watches.Put(w)
	}
	return resp, err
}

// CloseIdleConnections closes the connections that no request uses now.
func (t *Transport) CloseIdleConnections() { t.base.CloseIdleConnections() }

// Close ends the pool: idle connections are closed now, those in use after
// their request, and new requests fail with [ErrClosed]. It does not wait, and
// requests under way are left to their contexts. It always returns nil, and may
// be called again.
func (t *Transport) Close() error {
	t.closed.Store(true)
	t.base.CloseIdleConnections()
	return nil
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close()
	}
}
