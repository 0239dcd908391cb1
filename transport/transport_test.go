// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestDefaults(t *testing.T) {
	o := (*Options)(nil).withDefaults()
	assert.Equal(t, 2*time.Second, o.ConnectTimeout)
	assert.Equal(t, 256, o.MaxIdlePerHost)
	assert.Equal(t, 16<<10, o.ReadBuffer)
	assert.Equal(t, 8<<10, o.WriteBuffer)
	assert.Less(t, o.IdleTimeout, 5*time.Second, "uvicorn closes idle connections after 5 s")
	assert.Positive(t, o.MaxResponseHeaderBytes)

	none := (&Options{ConnectTimeout: -1, IdleTimeout: -1, MaxIdlePerHost: -1, ReadBuffer: -1,
		MaxResponseHeaderBytes: -1}).withDefaults()
	assert.Negative(t, none.ConnectTimeout)
	assert.Equal(t, defaultReadBuffer, none.ReadBuffer)
	assert.EqualValues(t, defaultMaxResponseHeaderBytes, none.MaxResponseHeaderBytes)
	tr := newTransport(t, &none)
	assert.Zero(t, tr.pool.timeout)
	s := newServer(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	assert.Equal(t, "ok", exchange(t, tr, post(t, s.URL, "x")), "no limit on connecting is not a limit of zero")
}

// A redirect from an engine would carry the prompt to a host that no picker chose.
func TestARedirectIsAResponse(t *testing.T) {
	var elsewhere atomic.Int32
	other := newServer(t, func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) })
	s := newServer(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", other.URL)
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
	resp := roundTrip(t, newTransport(t, nil), post(t, s.URL, "prompt"))
	drain(t, resp)
	assert.Equal(t, http.StatusTemporaryRedirect, resp.StatusCode)
	assert.Zero(t, elsewhere.Load())
}

// A compressed response passes as it is: nobody asked for it, and the client may be told what it is.
func TestCompressionIsNeitherAskedForNorUndone(t *testing.T) {
	var zipped bytes.Buffer
	zw := gzip.NewWriter(&zipped)
	_, _ = zw.Write([]byte("hello"))
	require.NoError(t, zw.Close())
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		assert.Empty(t, r.Header.Values("Accept-Encoding"))
		w.Header().Set("Content-Encoding", "gzip")
		_, _ = w.Write(zipped.Bytes())
	})
	resp := roundTrip(t, newTransport(t, nil), post(t, s.URL, "x"))
	assert.Equal(t, zipped.String(), drain(t, resp))
	assert.Equal(t, "gzip", resp.Header.Get("Content-Encoding"))
	assert.False(t, resp.Uncompressed)
}

// A sidecar's proxy variables must not see traffic between gateway and engines. The name engine.test is not a loopback
// one, which net/http never proxies.
func TestProxyVariablesAreIgnored(t *testing.T) {
	var proxied atomic.Int32
	proxy := newServer(t, func(http.ResponseWriter, *http.Request) { proxied.Add(1) })
	for _, name := range []string{"HTTP_PROXY", "http_proxy", "ALL_PROXY"} {
		t.Setenv(name, proxy.URL)
	}
	t.Setenv("NO_PROXY", "")
	s := newServer(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "direct") })
	dialed := make(chan string, 1)
	tr := newTransport(t, &Options{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		dialed <- address
		return plainDial(ctx, network, s.Listener.Addr().String())
	}})
	assert.Equal(t, "direct", exchange(t, tr, post(t, "http://engine.test:8000/v1", "x")))
	assert.Equal(t, "engine.test:8000", <-dialed)
	assert.Zero(t, proxied.Load())
}

func TestCookiesAreNotKept(t *testing.T) {
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		assert.Empty(t, r.Header.Values("Cookie"))
		http.SetCookie(w, &http.Cookie{Name: "session", Value: "1"})
	})
	tr := newTransport(t, nil)
	for range 2 {
		exchange(t, tr, post(t, s.URL, "x"))
	}
}

// burst runs n requests that are all under way at once.
func burst(t *testing.T, tr *Transport, url string, n int) {
	t.Helper()
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			resp, err := tr.RoundTrip(post(t, url, "x"))
			if !assert.NoError(t, err) {
				return
			}
			_, err = io.Copy(io.Discard, resp.Body)
			assert.NoError(t, err)
			assert.NoError(t, resp.Body.Close())
		})
	}
	wg.Wait()
}

// counting counts the connections of a server.
func counting(accepted *atomic.Int32) func(*httptest.Server) {
	return func(s *httptest.Server) {
		s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				accepted.Add(1)
			}
		}
	}
}

// barrier is an engine that answers once n requests have arrived.
func barrier(t *testing.T, n int) (url string, accepted *atomic.Int32) {
	t.Helper()
	accepted = new(atomic.Int32)
	var arrived atomic.Int32
	var mu sync.Mutex
	gate := make(chan struct{})
	s := newServer(t, func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		open := gate
		if int(arrived.Add(1))%n == 0 {
			close(gate)
			gate = make(chan struct{})
		}
		mu.Unlock()
		select {
		case <-open:
		case <-r.Context().Done():
		}
	}, counting(accepted))
	return s.URL, accepted
}

func TestABurstsConnectionsServeTheNextBurst(t *testing.T) {
	const n = 200
	url, accepted := barrier(t, n)
	tr := newTransport(t, nil)
	burst(t, tr, url, n)
	before := accepted.Load()
	assert.EqualValues(t, n, before)
	time.Sleep(2 * minPause) // after an exchange that took long, a connection serves none before
	burst(t, tr, url, n)
	assert.Equal(t, before, accepted.Load(), "connections opened by the second burst")
}

// The times of real engines, divided by 2.5: the engine closes idle connections after 2 s, the pool after 1.6 s, and
// requests come at about that time. A connection that was just used must not meet the engine's limit, so the times are
// no shorter.
func TestIdleConnectionsEndBeforeTheEngineEndsThem(t *testing.T) {
	for _, pause := range []time.Duration{1900, 1950, 1980, 1990, 2000, 2010, 2050} {
		t.Run((pause * time.Millisecond).String(), func(t *testing.T) {
			t.Parallel()
			var served atomic.Int32
			s := newServer(t, func(http.ResponseWriter, *http.Request) { served.Add(1) },
				func(s *httptest.Server) { s.Config.IdleTimeout = 2 * time.Second })
			tr := newTransport(t, &Options{IdleTimeout: 1600 * time.Millisecond})
			for range 8 {
				exchange(t, tr, post(t, s.URL, "x"))
			}
			time.Sleep(pause * time.Millisecond)
			for range 8 {
				exchange(t, tr, post(t, s.URL, "x"))
			}
			assert.EqualValues(t, 16, served.Load())
		})
	}
}

func TestAnIdleConnectionIsClosedByThePool(t *testing.T) {
	e := newEngine(t, func(e *engine, c net.Conn) {
		keepAlive(e, c)
		e.requests.Add(100) // the other side closed
	})
	tr := newTransport(t, &Options{IdleTimeout: 50 * time.Millisecond})
	exchange(t, tr, post(t, e.url(), "x"))
	waitFor(t, "closed by the pool", func() bool { return e.requests.Load() == 101 })
}

func TestIPv6LiteralsAreReached(t *testing.T) {
	l, err := net.Listen("tcp6", "[::1]:0")
	require.NoError(t, err, "this test needs ::1 on the loopback interface")
	newServer(t, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Host) },
		func(s *httptest.Server) {
			require.NoError(t, s.Listener.Close())
			s.Listener = l
		})
	assert.Equal(t, l.Addr().String(), exchange(t, newTransport(t, nil), post(t, "http://"+l.Addr().String(), "x")))
}

// Expect: 100-continue would make a leg wait for engines that do not implement it.
func TestExpectContinueDoesNotHoldTheBodyBack(t *testing.T) {
	e := newEngine(t, keepAlive)
	tr := newTransport(t, nil)
	req := post(t, e.url(), "body")
	req.Header.Set("Expect", "100-continue")
	start := time.Now()
	assert.Equal(t, "ok", exchange(t, tr, req))
	assert.Less(t, time.Since(start), 5*time.Second)
}

func TestTheRequestIsNotChangedAndTheResponseNamesIt(t *testing.T) {
	s := newServer(t, func(http.ResponseWriter, *http.Request) {})
	req := post(t, s.URL, "x")
	before := req.Header.Clone()
	resp := roundTrip(t, newTransport(t, nil), req)
	drain(t, resp)
	assert.Same(t, req, resp.Request)
	assert.Equal(t, before, req.Header)
}

// slowWriter is a connection whose Write returns after the engine can have answered.
type slowWriter struct{ net.Conn }

func (c slowWriter) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	time.Sleep(20 * time.Millisecond)
	return n, err
}

// Nothing may be written to an engine outside of requests.
func TestSwitchingProtocolsIsAnError(t *testing.T) {
	e := newEngine(t, func(e *engine, c net.Conn) {
		r := bufio.NewReader(c)
		e.read(r)
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_, err := r.ReadByte()
		assert.Error(t, err, "the connection is closed")
		e.requests.Add(1)
	})
	req, err := http.NewRequest(http.MethodGet, e.url(), nil)
	require.NoError(t, err)
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "echo")
	for i, own := range []bool{true, false} {
		_, err = newTransport(t, &Options{NetHTTP: !own,
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				c, err := plainDial(ctx, network, address)
				return slowWriter{c}, err
			}}).RoundTrip(req)
		failure(t, err, SentMaybe, KindProtocol)
		waitFor(t, "closed", func() bool { return int(e.requests.Load()) == 2*(i+1) })
	}
}

func TestCloseEndsThePool(t *testing.T) {
	release := make(chan struct{})
	closed := make(chan struct{}, 2)
	e := newEngine(t, func(e *engine, c net.Conn) {
		r := bufio.NewReader(c)
		for e.read(r) {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nok")
			<-release
			_, _ = io.WriteString(c, "ok")
		}
		closed <- struct{}{}
	})
	tr := New(nil)
	resp, err := tr.RoundTrip(post(t, e.url(), "x"))
	require.NoError(t, err)

	require.NoError(t, tr.Close())
	require.NoError(t, tr.Close(), "twice is once")
	_, err = tr.RoundTrip(post(t, e.url(), "x"))
	require.ErrorIs(t, err, ErrClosed)
	assert.Equal(t, SentNothing, Classify(err))

	close(release)
	assert.Equal(t, "okok", drain(t, resp), "a stream under way is left alone")
	select {
	case <-closed:
	case <-time.After(20 * time.Second):
		t.Fatal("the stream's connection outlived the pool")
	}
}

// plainReader has no method but Read, as a body made of segments may have.
type plainReader struct{ r io.Reader }

func (p plainReader) Read(b []byte) (int, error) { return p.r.Read(b) }
func (plainReader) Close() error                 { return nil }

func TestLargeBodiesArriveByteForByte(t *testing.T) {
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		assert.EqualValues(t, len(b), r.ContentLength)
		assert.Empty(t, r.TransferEncoding)
		_, _ = w.Write(b)
	})
	tr := newTransport(t, nil)
	for _, size := range []int{0, 1, 3000, 8000, 8192, 8193, 70_000, 1 << 20} {
		want := strings.Repeat("0123456789abcde", size/15+1)[:size]
		for name, body := range map[string]io.ReadCloser{
			"writes itself": io.NopCloser(strings.NewReader(want)),
			"is read":       plainReader{strings.NewReader(want)},
		} {
			req := post(t, s.URL, want)
			req.Body = body
			if size == 0 {
				req.Body = http.NoBody
			}
			got := exchange(t, tr, req)
			//nolint:testifylint // Equal would print a megabyte
			assert.True(t, got == want, "%d bytes, body that %s: %d came back", size, name, len(got))
		}
	}
}

func TestHTTP2IsOptIn(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Proto)
	}))
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(s.Close)
	trust := s.Client().Transport.(*http.Transport).TLSClientConfig
	assert.Equal(t, "HTTP/1.1", exchange(t, newTransport(t, &Options{TLS: trust}), post(t, s.URL, "x")))

	both := new(http.Protocols)
	both.SetHTTP1(true)
	both.SetHTTP2(true)
	assert.Equal(
		t, "HTTP/2.0", exchange(t, newTransport(t, &Options{TLS: trust, Protocols: both}), post(t, s.URL, "x")),
	)
}

func TestUnencryptedHTTP2IsOptIn(t *testing.T) {
	prior := new(http.Protocols)
	prior.SetUnencryptedHTTP2(true)
	prepare := func(s *httptest.Server) { s.Config.Protocols = prior }
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Proto) }, prepare)
	tr := newTransport(t, &Options{Protocols: prior})
	assert.Equal(t, "HTTP/2.0", exchange(t, tr, post(t, s.URL, "x")))

	_, err := newTransport(t, &Options{Protocols: prior}).RoundTrip(post(t, "http://"+refusedAddress(t), "x"))
	assert.Equal(t, SentNothing, Classify(err))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	hang := newServer(t, func(_ http.ResponseWriter, r *http.Request) { cancel(); <-r.Context().Done() }, prepare)
	_, err = tr.RoundTrip(post(t, hang.URL, "x").WithContext(ctx))
	assert.Equal(t, SentMaybe, Classify(err), "a shared connection tells nothing about one request")
}

func TestErrorsOfManyRequestsDoNotMix(t *testing.T) {
	e := newEngine(t, func(e *engine, c net.Conn) {
		r := bufio.NewReader(c)
		for {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, req.Body)
			if req.URL.Path == "/die" {
				return
			}
			_, _ = io.WriteString(c, okResponse)
		}
	})
	nobody := "http://" + refusedAddress(t)
	tr := newTransport(t, nil)
	var wg sync.WaitGroup
	for i := range 120 {
		wg.Go(func() {
			switch i % 3 {
			case 0:
				resp, err := tr.RoundTrip(post(t, e.url()+"/ok", "x"))
				if assert.NoError(t, err) {
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
			case 1:
				_, err := tr.RoundTrip(post(t, e.url()+"/die", "x"))
				assert.Equal(t, SentMaybe, Classify(err))
			case 2:
				_, err := tr.RoundTrip(post(t, nobody, "x"))
				assert.Equal(t, SentNothing, Classify(err))
			}
		})
	}
	wg.Wait()
}

// Who keeps a header's value keeps neither the response nor its request.
func TestAKeptHeaderHoldsNoRequest(t *testing.T) {
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("X-Tag", "0123456789")
	})
	tr := New(nil)
	defer tr.Close()
	collected := make(chan struct{})
	kept := func() string {
		req := post(t, s.URL, "prompt")
		runtime.AddCleanup(req, func(c chan struct{}) { close(c) }, collected)
		resp := roundTrip(t, tr, req)
		drain(t, resp)
		return resp.Header.Get("X-Tag")
	}()
	require.Eventually(t, func() bool {
		runtime.GC()
		select {
		case <-collected:
			return true
		default:
			return false
		}
	}, 20*time.Second, 10*time.Millisecond)
	assert.Equal(t, "0123456789", kept)
}

// A DialContext that panics does so in the goroutine that sent the request. One that ends its goroutine, as a test's
// does that fails, is an error: whoever waits for the leg must not wait forever.
func TestADialContextMayPanicOrEndItsGoroutine(t *testing.T) {
	ends := map[string]func(){"panic": func() { panic("of the host") }, "goexit": runtime.Goexit}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			tr := New(&Options{DialContext: func(context.Context, string, string) (net.Conn, error) {
				end()
				return nil, nil
			}})
			defer tr.Close()
			req := post(t, "http://127.0.0.1:1/", "")
			if name == "panic" {
				assert.PanicsWithValue(t, "of the host", func() { _, _ = tr.RoundTrip(req) })
				return
			}
			_, err := tr.RoundTrip(req)
			assert.ErrorContains(t, errors.Unwrap(err), "DialContext ended its goroutine")
		})
	}
}

func TestAPanicInTheHandshakeClosesTheConnection(t *testing.T) {
	ours, theirs := net.Pipe()
	tr := New(&Options{
		DialContext: func(context.Context, string, string) (net.Conn, error) { return ours, nil },
		GetTLS:      func() *tls.Config { panic("of the host") },
	})
	defer tr.Close()
	req := post(t, "https://127.0.0.1:1/", "")
	assert.PanicsWithValue(t, "of the host", func() { _, _ = tr.RoundTrip(req) })
	_ = theirs.SetReadDeadline(time.Now().Add(5 * time.Second)) // fails where the other end is closed already
	_, err := theirs.Read(make([]byte, 1))
	assert.Equal(t, io.EOF, err)
}
