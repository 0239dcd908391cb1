// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"crypto/tls"
	"net/http"
	"sync"
	"sync/atomic"
)

// Transport sends requests to engines. It is an [http.RoundTripper], safe for
// concurrent use, and follows no redirect, asks for and decodes no compression,
// keeps no cookies and ignores the proxy variables of the environment.
//
// HTTP/1.1 is spoken in the goroutines of the callers: RoundTrip writes the
// request and reads the response's head, Read of the response's body reads from the
// connection. An idle connection costs no goroutine and no buffer, and one that
// waits for a response or for its next part no goroutine.
//
// Connections serve again once a response's body was read to its end; Close
// before that closes them. A connection on which anything came in while it was
// idle, its end or words unasked, is not used again. No request is ever sent
// twice after a byte of it may have left, whatever its method; one of which
// nothing left because its idle connection had died goes out on another.
//
// A body that fits the write buffer together with the head is read first, then
// sent with it in one call; that is also when a body of unknown length is read,
// whole, since requests always tell their Content-Length. Larger bodies go to
// the connection by their own WriteTo method if they have one, and then are not
// copied on the way. If the writer it is given has the method
// WriteBuffers([][]byte) (int64, error), WriteTo may hand over all its parts in
// one call. A body whose Read blocks holds RoundTrip up; the context cannot end
// it.
//
// A response that comes before the body is written ends the writing where that
// fails, or is stuck for some 200 ms: the response is returned, and its connection
// is not used again. A body written all the way is followed by its response as
// usual, however early that came.
//
// Requests must have an ASCII host, and neither trailers nor the method
// CONNECT; of their header, Host, Content-Length, Transfer-Encoding and Trailer
// are not sent. No User-Agent is made up. Interim responses are skipped, and 101
// is an error. Hooks of net/http/httptrace are called only where
// [Options].Protocols hands requests to net/http.
//
// There is no limit on the time a response takes: that is the context's
// business. It covers the response's body until that is closed or read to its
// end.
type Transport struct {
	options Options
	tls     *tls.Config
	other   *standard // nil for HTTP/1.1 alone
	pool    pool
	closed  atomic.Bool

	readBuffers, writeBuffers, bodyBuffers sync.Pool // *[]byte
}

// New returns a Transport; nil options are allowed. Close it when done.
func New(options *Options) *Transport {
	t := &Transport{options: options.withDefaults()}
	t.pool.limit, t.pool.timeout = max(t.options.MaxIdlePerHost, 0), max(t.options.IdleTimeout, 0)
	t.readBuffers.New = buffersOf(t.options.ReadBuffer)
	t.writeBuffers.New = buffersOf(t.options.WriteBuffer)
	t.bodyBuffers.New = buffersOf(bodyBuffer)

	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	if t.options.Protocols != nil {
		*protocols = *t.options.Protocols
	}
	t.tls = clientTLS(t.options.TLS, protocols)
	if t.options.NetHTTP || protocols.HTTP2() || protocols.UnencryptedHTTP2() {
		t.other = newStandard(t, protocols)
	}
	return t
}

func buffersOf(size int) func() any {
	return func() any {
		b := make([]byte, size)
		return &b
	}
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

// RoundTrip sends one request. Responses of any status are responses, not errors.
// Errors are of type [*Error], those of reading the response's body included. The
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
	if t.other != nil {
		if g := gateOf(ctx); g != nil && g.try == nil {
			return g.send(ctx, t.other, req)
		}
		return t.other.send(ctx, req)
	}
	return t.exchange(ctx, req)
}

// CloseIdleConnections closes the connections that no request uses now.
func (t *Transport) CloseIdleConnections() { t.closeIdle(false) }

func (t *Transport) closeIdle(final bool) {
	t.pool.closeIdle(final)
	if t.other != nil {
		t.other.base.CloseIdleConnections()
	}
}

// Close ends the pool: idle connections are closed now, those in use after
// their request, and new requests fail with [ErrClosed]. It does not wait, and
// requests under way are left to their contexts. It always returns nil, and may
// be called again.
func (t *Transport) Close() error {
	t.closed.Store(true)
	t.closeIdle(true)
	return nil
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close()
	}
}
