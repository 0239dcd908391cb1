// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"crypto/tls"
	"net/http"
	"sync"
	"sync/atomic"
)

// Transport sends requests to engines. It is an [http.RoundTripper], safe for concurrent use. It follows no redirects,
// neither asks for compression nor decodes it, keeps no cookies and ignores the proxy variables of the environment.
//
// HTTP/1.1 runs in the goroutines of the callers: RoundTrip writes the request and reads the response's head, and Read
// of the response's body reads from the connection. An idle connection costs no goroutine and no buffer. A connection
// that waits for a response or for its next part costs no goroutine.
//
// A connection is used again after its response's body was read to the end, until it is as old as
// [Options].MaxConnectionAge says; Close before that end closes it. Of an engine's idle connections that are surely
// alive any may be used next; net/http's own transport uses the one used last. If anything
// arrived while a connection was idle, its end or unexpected bytes, it is not used again. An engine that has sent bytes
// that nobody asked for, or a response to another request, gets a new connection for each request, for 5 minutes since
// it last did so or until its address has refused a connection. A response is known to be another's by the request's
// X-Request-Id, if the engine repeats it: in that header, or at the begin of its responses, as vLLM does. After an
// exchange of 50 ms or more a connection pauses for 10 ms, in which a response too many is seen.
//
// No request is ever sent twice after a byte of it may have left, whatever its method. If nothing left because the idle
// connection had died, the request goes out on another one.
//
// A body that fits the write buffer together with the head is read first, then sent with the head in one call. A body
// of unknown length is also read first, whole, since requests always have a Content-Length. A larger body writes itself
// to the connection by its WriteTo method if it has one, and then it is not copied on the way. If the writer that
// WriteTo gets has the method WriteBuffers([][]byte) (int64, error), WriteTo may write all its parts with one call. A
// body whose Read blocks holds RoundTrip up; the context cannot end that.
//
// A response may come before the whole body is written. If writing then fails, or is stuck for about 200 ms, writing
// ends, the response is returned, and its connection is not used again. If the whole body can be written, the response
// is returned as usual, however early it came. A response of status 2xx to a request that was not written whole cannot
// be the engine's response to it: on a reused connection it is an error.
//
// Requests must have an ASCII host, no trailers, and another method than CONNECT. Of their header, Host,
// Content-Length, Transfer-Encoding and Trailer are not sent. The transport adds no User-Agent. It skips interim
// responses; 101 is an error. Hooks of net/http/httptrace are called only if [Options].Protocols or NetHTTP hands
// requests to net/http.
//
// The transport has no limit on the time of a response; the request's context has. It covers the response's body until
// the body is closed or read to its end.
type Transport struct {
	options Options
	tls     *tls.Config
	other   *standard // nil if only this package's HTTP/1.1 is used
	pool    pool
	closed  atomic.Bool

	suspects suspects

	readBuffers, writeBuffers, bodyBuffers sync.Pool // *[]byte
}

// New returns a Transport; options may be nil. Close it when done.
func New(options *Options) *Transport {
	t := &Transport{options: options.withDefaults()}
	t.pool.limit, t.pool.timeout = max(t.options.MaxIdlePerHost, 0), max(t.options.IdleTimeout, 0)
	t.pool.sure = max(t.pool.period()/2, minPause)
	t.readBuffers.New = buffersOf(t.options.ReadBuffer)
	t.writeBuffers.New = buffersOf(t.options.WriteBuffer)
	t.bodyBuffers.New = buffersOf(bodyBuffer)

	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	if t.options.Protocols != nil {
		*protocols = *t.options.Protocols
	}
	var versions []string
	if protocols.HTTP2() {
		versions = append(versions, "h2")
	}
	if protocols.HTTP1() {
		versions = append(versions, "http/1.1")
	}
	t.tls = clientTLS(t.options.TLS, versions)
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

// clientTLS returns a copy of config (nil allowed) fit for this package's own handshakes.
func clientTLS(config *tls.Config, versions []string) *tls.Config {
	out := new(tls.Config)
	if config != nil {
		out = config.Clone()
	}
	out.MinVersion = max(out.MinVersion, tls.VersionTLS12)
	out.NextProtos = versions
	return out
}

// RoundTrip sends one request. A response of any status is a response, not an error. Errors are of type [*Error], also
// those of reading the response's body. The request is not changed, and its body is always closed.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	return t.send(req.Context(), req)
}

// send does what RoundTrip does, under the given context.
func (t *Transport) send(ctx context.Context, req *http.Request) (*http.Response, error) {
	if t.closed.Load() {
		closeBody(req)
		return nil, &Error{Sent: SentNothing, Kind: KindOther, Err: ErrClosed, final: true}
	}
	if t.other != nil {
		return t.sendOther(ctx, req)
	}
	return t.roundTrip(ctx, req)
}

// sendOther sends a copy of the request through net/http, whose goroutines may look at it after the response has come.
// Whoever sends through a Transport need not know that, and may use the request's memory again.
func (t *Transport) sendOther(ctx context.Context, req *http.Request) (resp *http.Response, err error) {
	sent := req.Clone(ctx)
	if g := checkOf(ctx); g != nil && g.try == nil {
		resp, err = g.send(ctx, t.other, sent)
	} else {
		resp, err = t.other.send(ctx, sent)
	}
	if err != nil {
		return nil, err
	}
	resp.Request = req
	return resp, nil
}

// CloseIdleConnections closes the connections that no request uses now.
func (t *Transport) CloseIdleConnections() { t.closeIdle(false) }

func (t *Transport) closeIdle(final bool) {
	t.pool.closeIdle(final)
	if t.other != nil {
		t.other.base.CloseIdleConnections()
	}
}

// Close ends the pool: it closes idle connections now and the others after their requests; new requests fail with
// [ErrClosed]. Close does not wait, and running requests end by their contexts. It always returns nil, and may be
// called again.
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
