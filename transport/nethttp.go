// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
)

// standard sends requests by net/http's own transport, for [Options].NetHTTP and for [Options].Protocols with more than
// HTTP/1.1. It turns net/http's errors into this package's.
type standard struct {
	base       *http.Transport
	unpooled   *http.Transport // for WithNewConnection
	t          *Transport
	plainHTTP2 bool
	watches    sync.Pool // *watch
}

func newStandard(t *Transport, protocols *http.Protocols) *standard {
	s := &standard{t: t, plainHTTP2: protocols.UnencryptedHTTP2() && !protocols.HTTP1()}
	s.watches.New = func() any { return newWatch() }
	s.base = &http.Transport{
		DialContext:            s.dialPlain,
		DialTLSContext:         s.dialTLS,
		TLSClientConfig:        t.tls,
		DisableCompression:     true,
		MaxIdleConnsPerHost:    t.options.MaxIdlePerHost,
		IdleConnTimeout:        max(t.options.IdleTimeout, 0),
		ReadBufferSize:         t.options.ReadBuffer,
		WriteBufferSize:        t.options.WriteBuffer,
		MaxResponseHeaderBytes: t.options.MaxResponseHeaderBytes,
		Protocols:              protocols,
	}
	s.unpooled = s.base.Clone()
	s.unpooled.DisableKeepAlives = true
	return s
}

// connection returns what net/http reads a response of HTTP/1 from.
func (s *standard) connection(raw net.Conn, state *tls.ConnectionState, address string) *counted {
	c := &counted{Conn: raw, tls: state, ends: s.t.options.connectionEnds()}
	c.suspect = func() {
		if s.t.suspects.add(address) {
			s.base.CloseIdleConnections() // of all engines, since those of one cannot be named
		}
	}
	return c
}

func (s *standard) dialPlain(ctx context.Context, _, address string) (net.Conn, error) {
	raw, _, err := s.t.dial(ctx, address, false)
	if err != nil {
		return nil, err
	}
	if s.plainHTTP2 {
		return raw, nil // many requests share it, so its bytes tell nothing about one
	}
	return s.connection(raw, nil, address), nil
}

func (s *standard) dialTLS(ctx context.Context, _, address string) (net.Conn, error) {
	_, secured, err := s.t.dial(ctx, address, true)
	if err != nil {
		return nil, err
	}
	state := secured.ConnectionState()
	if state.NegotiatedProtocol == "h2" {
		return secured, nil // net/http must see the type to speak HTTP/2
	}
	return s.connection(secured, &state, address), nil
}

// RoundTrip implements http.RoundTripper.
func (s *standard) RoundTrip(req *http.Request) (*http.Response, error) {
	return s.send(req.Context(), req)
}

func (s *standard) send(ctx context.Context, req *http.Request) (*http.Response, error) {
	w := s.watches.Get().(*watch)
	pooled := true
	if httptrace.ContextClientTrace(ctx) != nil {
		// Merging the two traces would change ours for good.
		w, pooled = newWatch(), false
	}
	base := s.base
	if wantsNew(ctx) || s.t.suspects.has(keyOf(req)) {
		base = s.unpooled
	}
	resp, err := base.RoundTrip(req.WithContext(httptrace.WithClientTrace(ctx, &w.trace)))
	if s.t.closed.Load() {
		// Close was called during this request, so its connection must not stay in the pool.
		s.base.CloseIdleConnections()
	}
	if err == nil && resp.StatusCode == http.StatusSwitchingProtocols {
		_ = resp.Body.Close()
		err = errSwitch // nobody here writes to an engine outside of requests
		w.sent = true   // an answer can come before net/http's writer has counted what was written
	}
	if err == nil && w.conn != nil && w.conn.misplaced(idOf(req), resp.Header, nil) {
		_ = resp.Body.Close()
		err = errMisplaced
		w.sent = true
	}
	if err != nil {
		failed := w.failure(ctx, err)
		if w.reused && failed.Kind == KindProtocol && w.conn != nil {
			w.conn.suspect()
		}
		resp, err = nil, failed
	} else {
		resp.Request = req
		if resp.TLS == nil && w.conn != nil {
			resp.TLS = w.conn.tls
		}
		if resp.Body != http.NoBody {
			resp.Body = &standardBody{ReadCloser: resp.Body, ctx: ctx, reused: w.reused, id: idOf(req),
				conn: w.conn, request: w.request}
		} else if w.conn != nil {
			w.conn.end(w.request)
		}
	}
	if pooled {
		w.reset()
		s.watches.Put(w)
	}
	return resp, err
}

// standardBody turns errors of reading a response into this package's, which hold no address.
type standardBody struct {
	io.ReadCloser
	ctx     context.Context
	reused  bool
	closed  atomic.Bool
	id      string   // the request's X-Request-Id
	begun   bool     // bytes of the body have come
	conn    *counted // nil on HTTP/2
	request int64    // its number on conn
}

// Close closes the body.
func (b *standardBody) Close() error {
	b.closed.Store(true)
	return b.ReadCloser.Close()
}

func (b *standardBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 && !b.begun && b.conn != nil {
		if b.begun = true; b.conn.misplaced(b.id, nil, p[:n]) {
			_ = b.ReadCloser.Close()
			b.conn.suspect()
			n, err = 0, errMisplaced
		}
	}
	if err == io.EOF && b.conn != nil {
		b.conn.end(b.request)
	}
	if b.closed.Load() && err != nil {
		err = http.ErrBodyReadAfterClose
	}
	if err != nil && err != io.EOF {
		err = bodyError(b.ctx, err, b.reused)
	}
	return n, err
}
