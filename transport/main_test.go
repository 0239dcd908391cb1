// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bufio"
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim/freeport"
)

// netHTTP makes the tests run over net/http's client.
var netHTTP = os.Getenv("PDKIT_TEST_HTTP_CLIENT") == "nethttp"

// ownOnly skips a test, if net/http's client is used, of what only this package's own client does. why says what
// net/http's client does.
func ownOnly(t testing.TB, why string) {
	t.Helper()
	if netHTTP {
		t.Skip("net/http's client " + why)
	}
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newTransport returns a Transport that is closed with the test.
func newTransport(t testing.TB, options *Options) *Transport {
	t.Helper()
	var o Options
	if options != nil {
		o = *options
	}
	o.NetHTTP = o.NetHTTP || netHTTP
	tr := New(&o)
	t.Cleanup(func() { require.NoError(t, tr.Close()) })
	return tr
}

// newServer starts a server, after prepare has changed what is to be different.
func newServer(t testing.TB, h http.HandlerFunc, prepare ...func(*httptest.Server)) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	for _, f := range prepare {
		f(s)
	}
	s.Start()
	t.Cleanup(s.Close)
	return s
}

// post returns a decode-like request: a POST whose body can be read again.
func post(t testing.TB, url, body string) *http.Request {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, url, strings.NewReader(body))
	require.NoError(t, err)
	return req
}

// drain reads a response to its end, so that its connection can serve again.
func drain(t testing.TB, resp *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return string(b)
}

// roundTrip sends a request that must succeed. exchange reads its response, too.
func roundTrip(t testing.TB, tr http.RoundTripper, req *http.Request) *http.Response {
	t.Helper()
	resp, err := tr.RoundTrip(req)
	require.NoError(t, err)
	return resp
}

func exchange(t testing.TB, tr http.RoundTripper, req *http.Request) string {
	t.Helper()
	return drain(t, roundTrip(t, tr, req))
}

// failure requires an *Error that says how far the request got, and what went wrong.
func failure(t testing.TB, err error, sent Sent, kind Kind) *Error {
	t.Helper()
	var got *Error
	require.ErrorAs(t, err, &got)
	assert.Equal(t, sent, got.Sent, "underlying: %v", got.Err)
	assert.Equal(t, kind, got.Kind, "underlying: %v", got.Err)
	return got
}

// engine is a TCP server that plays one script for each connection. A script can do what net/http's server cannot, such
// as reset the connection.
type engine struct {
	net.Listener
	accepted atomic.Int32
	requests atomic.Int32
	wg       sync.WaitGroup
	mu       sync.Mutex
	conns    []net.Conn
}

func newEngine(t testing.TB, script func(e *engine, c net.Conn)) *engine {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	e := &engine{Listener: l}
	e.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			e.accepted.Add(1)
			e.mu.Lock()
			e.conns = append(e.conns, c)
			e.mu.Unlock()
			e.wg.Go(func() {
				defer func() { _ = c.Close() }()
				script(e, c)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		e.mu.Lock()
		for _, c := range e.conns {
			_ = c.Close()
		}
		e.mu.Unlock()
		e.wg.Wait()
	})
	return e
}

// says returns a script that reads a request, writes a text and ends the connection.
func says(text string) func(*engine, net.Conn) {
	return func(e *engine, c net.Conn) {
		e.read(bufio.NewReader(c))
		_, _ = io.WriteString(c, text)
	}
}

func (e *engine) url() string { return "http://" + e.Addr().String() }

// read takes one whole request from r.
func (e *engine) read(r *bufio.Reader) bool {
	req, err := http.ReadRequest(r)
	if err != nil {
		return false
	}
	if _, err := io.Copy(io.Discard, req.Body); err != nil {
		return false
	}
	e.requests.Add(1)
	return true
}

const (
	okResponse  = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	chunkedHead = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
)

// reset closes c so that the other side sees a reset, not an end.
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Close()
}

// refusedAddress is a port that nobody listens on.
func refusedAddress(t testing.TB) string {
	t.Helper()
	port, err := freeport.One()
	require.NoError(t, err)
	return net.JoinHostPort("127.0.0.1", port)
}

// plainDial opens a connection as a transport does without DialContext.
func plainDial(ctx context.Context, network, address string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, address)
}

// dialFails is a DialContext that fails with err.
func dialFails(err error) func(context.Context, string, string) (net.Conn, error) {
	return func(context.Context, string, string) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
	}
}

// blackhole dials a host that never answers: packets vanish on the way.
func blackhole(ctx context.Context, _, _ string) (net.Conn, error) {
	<-ctx.Done()
	return nil, &net.OpError{Op: "dial", Net: "tcp", Err: ctx.Err()}
}

// quietLog keeps expected complaints of test servers out of the output.
func quietLog() *log.Logger { return log.New(io.Discard, "", 0) }

// waitFor polls until another goroutine has made a condition true.
func waitFor(t testing.TB, what string, cond func() bool) {
	t.Helper()
	require.Eventually(t, cond, 20*time.Second, time.Millisecond, what)
}
