// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/transport"
)

// network dials for a test: it makes connecting to an address slow or impossible, and counts the bytes written to it.
type network struct {
	mu      sync.Mutex
	delay   map[string]time.Duration
	down    map[string]bool
	written map[string]int
}

func newNetwork() *network {
	return &network{delay: map[string]time.Duration{}, down: map[string]bool{}, written: map[string]int{}}
}

func (n *network) dial(ctx context.Context, network, address string) (net.Conn, error) {
	n.mu.Lock()
	delay, down := n.delay[address], n.down[address]
	n.mu.Unlock()
	time.Sleep(delay)
	if down {
		return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
	}
	c, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &countedConn{Conn: c, n: n, address: address}, nil
}

func (n *network) sent(address string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.written[address]
}

type countedConn struct {
	net.Conn
	n       *network
	address string
}

func (c *countedConn) Write(p []byte) (int, error) {
	written, err := c.Conn.Write(p)
	c.n.mu.Lock()
	c.n.written[c.address] += written
	c.n.mu.Unlock()
	return written, err
}

// roundTripper is a round tripper of a host, which wraps another one.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func settingAHeader(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		r = r.Clone(r.Context())
		r.Header.Set("Authorization", "Bearer x")
		return next.RoundTrip(r)
	})
}

type readBody struct{ io.ReadCloser }

func wrappingTheBody(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		r = r.WithContext(r.Context())
		r.Body, r.GetBody = readBody{r.Body}, nil
		return next.RoundTrip(r)
	})
}

// readingFirst is a round tripper that reads the whole body before it connects, as those do that retry. It hides the
// error of that read.
func readingFirst(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		b, err := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if err != nil {
			return nil, err
		}
		r = r.WithContext(r.Context())
		r.Body, r.GetBody = io.NopCloser(bytes.NewReader(b)), nil
		resp, err := next.RoundTrip(r)
		if err != nil {
			return nil, errors.New("gave up")
		}
		return resp, nil
	})
}

func noWrapper(next http.RoundTripper) http.RoundTripper { return next }

// clients are ways to send requests. Each starts with a client of its own, and is wrapped.
var clients = []struct {
	name string
	http2,
	own bool
	wrap func(http.RoundTripper) http.RoundTripper
}{
	{name: "our transport", own: true, wrap: noWrapper},
	{name: "our transport, setting a header", own: true, wrap: settingAHeader},
	{name: "our transport, wrapping the body", own: true, wrap: wrappingTheBody},
	{name: "our transport, reading the body first", own: true, wrap: readingFirst},
	{name: "our transport over HTTP/2", own: true, http2: true, wrap: noWrapper},
	{name: "our transport over HTTP/2, reading the body first", own: true, http2: true, wrap: readingFirst},
	{name: "net/http's", wrap: noWrapper},
	{name: "net/http's, setting a header", wrap: settingAHeader},
	{name: "net/http's, wrapping the body", wrap: wrappingTheBody},
	{name: "net/http's, reading the body first", wrap: readingFirst},
	{name: "net/http's over HTTP/2", http2: true, wrap: noWrapper},
	{name: "net/http's over HTTP/2, reading the body first", http2: true, wrap: readingFirst},
}

// eachClient runs a test with each way to send requests. limits are the flow's.
func eachClient(t *testing.T, c connector.KVConnector, limits config.Timeouts,
	test func(t *testing.T, x *scripted, n *network, http2 bool)) {
	for _, client := range clients {
		t.Run(client.name, func(t *testing.T) {
			n := newNetwork()
			protocols := new(http.Protocols)
			protocols.SetHTTP1(!client.http2)
			protocols.SetUnencryptedHTTP2(client.http2)
			var rt http.RoundTripper
			if client.own {
				own := transport.New(&transport.Options{DialContext: n.dial, Protocols: protocols})
				t.Cleanup(func() { _ = own.Close() })
				rt = own
			} else {
				foreign := &http.Transport{DialContext: n.dial, Protocols: protocols}
				t.Cleanup(foreign.CloseIdleConnections)
				rt = foreign
			}
			x := script(t, c, answer(ok), answer(ok), pdflow.WithTransport(client.wrap(rt)),
				pdflow.WithTimeouts(limits))
			test(t, x, n, client.http2)
		})
	}
}

// With any round tripper, a leg that runs together with the other is written only when both legs have a connection.
func TestLegsGoOutTogetherThroughAnyRoundTripper(t *testing.T) {
	t.Parallel()
	c := &runsOn{fake: fake{order: connector.Together}}
	for _, down := range []pdflow.LegKind{pdflow.LegPrefill, pdflow.LegDecode, ""} {
		t.Run("down: "+string(down), func(t *testing.T) {
			eachClient(t, c, config.Timeouts{}, func(t *testing.T, x *scripted, n *network, http2 bool) {
				here, there := x.pair.Prefill.URL.Host, x.pair.Decode.URL.Host
				if down == pdflow.LegDecode {
					here, there = there, here
				}
				n.delay[here] = 50 * time.Millisecond // so that the other connection stands first
				if n.down[here] = down != ""; !n.down[here] {
					require.Equal(t, "hi", post(t, x.url, "/v1/completions", completion("a", "")).text(t))
					require.Equal(t, "hi", post(t, x.url, "/v1/completions", completion("a", "")).text(t),
						"over the same connections")
					return
				}
				r := post(t, x.url, "/v1/completions", completion("a", ""))
				require.Equal(t, 502, r.status, r.body)
				require.Empty(t, x.all(), "an engine cannot be reached, and the other got its leg")
				if !http2 { // whose connections greet each other
					require.Zero(t, n.sent(there), "an engine cannot be reached, and some of the other leg was sent")
				}
				o := last(x)
				require.False(t, o.Orphan)
				require.Equal(t, down, o.Err.Leg)
				require.Equal(t, "connect", o.Err.Phase, "%v", o.Err)
			})
		})
	}
}

// The flow checks the handoff's age when it writes the decode leg, and not only when it makes the leg: connecting to D
// may take longer than the handoff is valid, and a real engine then answers 200 with another prompt's text.
func TestAHandoffThatAgesWhileDIsReachedIsNotSent(t *testing.T) {
	t.Parallel()
	limits := config.Timeouts{}
	limits.Handoff = 100 * time.Millisecond
	eachClient(t, &fake{}, limits, func(t *testing.T, x *scripted, n *network, http2 bool) {
		d := x.pair.Decode.URL.Host
		n.delay[d] = 150 * time.Millisecond
		r := post(t, x.url, "/v1/completions", completion("a", ""))
		require.Equal(t, 502, r.status, r.body)
		_, code := r.fault(t)
		require.Equal(t, "handoff_expired", code)
		require.Equal(t, "P", x.all(), "D got a handoff that is too old")
		if !http2 {
			require.Zero(t, n.sent(d))
		}
		n.mu.Lock()
		n.delay = nil
		n.mu.Unlock()
		for i := 0; ; i++ {
			r = post(t, x.url, "/v1/completions", completion("a", ""))
			if !strings.Contains(r.body, "handoff_expired") || i == 20 {
				break // else the machine is so busy that also this handoff became too old
			}
		}
		require.Equal(t, "hi", r.text(t))
	})
}

// A round tripper that ignores httptrace shows the flow only that it reads the body.
func TestARoundTripperWithoutHttptraceIsHeldAtItsBody(t *testing.T) {
	var x *scripted
	down := errors.New("down")
	var body []byte
	rt := roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.URL.Host == x.pair.Prefill.URL.Host && body == nil {
			time.Sleep(50 * time.Millisecond)
			return nil, down
		}
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		body = b
		return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(ok)),
			ContentLength: int64(len(ok)), Request: r}, nil
	})
	x = script(t, &runsOn{fake: fake{order: connector.Together}}, answer(ok), answer(ok), pdflow.WithTransport(rt))
	require.Equal(t, 502, post(t, x.url, "/v1/completions", completion("a", "")).status)
	require.Empty(t, body, "D's body was read although P is down")
	require.False(t, last(x).Orphan)
}
