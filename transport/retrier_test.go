// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/sharedtest"
)

var atOnce = RetryPolicy{Max: 2, BackoffBase: time.Millisecond, BackoffMax: 2 * time.Millisecond}

// refuseFirst fails the first n dials, and then dials.
func refuseFirst(n int32) (dial func(context.Context, string, string) (net.Conn, error), dials *atomic.Int32) {
	dials = new(atomic.Int32)
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		if dials.Add(1) <= n {
			return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
		}
		return plainDial(ctx, network, address)
	}, dials
}

func TestUnsentRequestsAreSentAgain(t *testing.T) {
	var served atomic.Int32
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		served.Add(1)
		b, err := io.ReadAll(r.Body)
		assert.NoError(t, err)
		assert.EqualValues(t, len(b), r.ContentLength)
		assert.Empty(t, r.TransferEncoding, "never chunked")
		assert.Equal(t, "kept", r.Header.Get("X-Leg"))
		assert.Empty(t, r.Header.Get("Authorization"),
			"the URL's user is not turned into a header, as in the first try")
		_, _ = w.Write(b)
	})
	dial, dials := refuseFirst(2)
	r := NewRetrier(newTransport(t, &Options{DialContext: dial}), atOnce)
	req := post(t, strings.Replace(s.URL, "http://", "http://user:pass@", 1), "the body")
	req.Header.Set("X-Leg", "kept")
	resp, err := r.Do(t.Context(), req)
	require.NoError(t, err)
	assert.Equal(t, "the body", drain(t, resp))
	assert.EqualValues(t, 3, dials.Load())
	assert.EqualValues(t, 1, served.Load())
}

func TestTriesEndWithThePolicy(t *testing.T) {
	for _, row := range []struct {
		rule  string
		max   int
		dials int32
	}{
		{"default: one extra try", 0, 2},
		{"none", -1, 1},
		{"three", 3, 4},
	} {
		t.Run(row.rule, func(t *testing.T) {
			dial, dials := refuseFirst(100)
			r := NewRetrier(newTransport(t, &Options{DialContext: dial}),
				RetryPolicy{Max: row.max, BackoffBase: time.Millisecond})
			_, err := r.Do(t.Context(), post(t, "http://engine.test", "x"))
			failure(t, err, SentNothing, KindRefused)
			assert.IsType(t, (*Error)(nil), err) //nolint:testifylint // the error itself, not one that it wraps
			assert.NotContains(t, err.Error(), "engine.test")
			assert.Equal(t, row.dials, dials.Load())
		})
	}
}

// Responses belong to the flow, whatever they say; an hour of Retry-After is not slept away here.
func TestResponsesAreNeverRetried(t *testing.T) {
	for _, afterRetry := range []bool{false, true} {
		for _, status := range []int{200, 307, 404, 429, 500, 503} {
			var served atomic.Int32
			s := newServer(t, func(w http.ResponseWriter, _ *http.Request) {
				served.Add(1)
				w.Header().Set("Retry-After", "3600")
				w.Header().Set("Location", "http://bad host/%zz")
				w.WriteHeader(status)
				_, _ = io.WriteString(w, "as it came")
			})
			options := &Options{}
			if afterRetry {
				options.DialContext, _ = refuseFirst(1)
			}
			resp, err := NewRetrier(newTransport(t, options), atOnce).Do(t.Context(), post(t, s.URL, "x"))
			require.NoError(t, err)
			assert.Equal(t, status, resp.StatusCode)
			assert.Equal(t, "as it came", drain(t, resp))
			assert.EqualValues(t, 1, served.Load())
		}
	}
}

func TestMaybeSentIsNotRetried(t *testing.T) {
	for _, first := range []int32{0, 1} { // the first try, and one after a refused dial
		e := newEngine(t, says(""))
		dial, dials := refuseFirst(first)
		_, err := NewRetrier(newTransport(t, &Options{DialContext: dial}), atOnce).Do(t.Context(),
			post(t, e.url(), "x"))
		assert.Equal(t, SentMaybe, Classify(err))
		assert.EqualValues(t, 1, e.requests.Load())
		assert.Equal(t, first+1, dials.Load())
	}
}

func TestHopelessRequestsAreTriedOnce(t *testing.T) {
	ca, stranger := sharedtest.NewAuthority(t, "ca"), sharedtest.NewAuthority(t, "stranger")
	s := newTLSEngine(t, ca, nil, 0)
	var dials atomic.Int32
	tr := newTransport(t, &Options{
		TLS: trustOnly(stranger),
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			dials.Add(1)
			return plainDial(ctx, network, address)
		},
	})
	_, err := NewRetrier(tr, atOnce).Do(t.Context(), post(t, s.URL, "x"))
	assert.Equal(t, SentNothing, Classify(err))
	assert.EqualValues(t, 1, dials.Load(), "a certificate does not get better")

	refusing, refused := refuseFirst(100)
	req := post(t, "http://engine.test", "x")
	req.GetBody = nil
	_, err = NewRetrier(newTransport(t, &Options{DialContext: refusing}), atOnce).Do(t.Context(), req)
	assert.Equal(t, SentNothing, Classify(err))
	assert.EqualValues(t, 1, refused.Load(), "a body that cannot be had again")
}

func TestTheContextEndsTheWait(t *testing.T) {
	errGone := errors.New("client is gone")
	refuse, dials := refuseFirst(100)
	ctx, cancel := context.WithCancelCause(t.Context())
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		time.AfterFunc(30*time.Millisecond, func() { cancel(errGone) }) // not before the first try
		return refuse(ctx, network, address)
	}
	r := NewRetrier(newTransport(t, &Options{DialContext: dial}),
		RetryPolicy{Max: 5, BackoffBase: time.Hour, BackoffMax: time.Hour})
	start := time.Now()
	_, err := r.Do(ctx, post(t, "http://engine.test", "x"))
	assert.Less(t, time.Since(start), 30*time.Second)
	failure(t, err, SentNothing, KindCanceled)
	require.ErrorIs(t, err, errGone)
	require.ErrorIs(t, err, context.Canceled)
	assert.EqualValues(t, 1, dials.Load())
}

// The next try's body is opened before the wait, and closed if no try follows: pdflow learns by it that the leg is not
// on its way. The retrier does not wait for a try that can only fail, beyond the deadline: its client would wait in
// vain.
func TestTheNextBodyIsOpenedBeforeTheWait(t *testing.T) {
	for name, deadline := range map[string]bool{"the context ends": false, "the deadline is too near": true} {
		t.Run(name, func(t *testing.T) {
			dial, _ := refuseFirst(100)
			// The random wait is below 30 seconds with a chance of 1 to 12,000,000.
			r := NewRetrier(newTransport(t, &Options{DialContext: dial}),
				RetryPolicy{Max: 5, BackoffBase: 100_000 * time.Hour, BackoffMax: 100_000 * time.Hour})
			ctx, cancel := context.WithCancel(t.Context())
			if deadline {
				ctx, cancel = context.WithTimeout(t.Context(), 30*time.Second)
			}
			defer cancel()
			req := post(t, "http://engine.test", "x")
			body := &closeTeller{ReadCloser: http.NoBody}
			req.GetBody = func() (io.ReadCloser, error) {
				if !deadline {
					cancel()
				}
				return body, nil
			}
			start := time.Now()
			_, err := r.Do(ctx, req)
			assert.Less(t, time.Since(start), 15*time.Second)
			require.True(t, body.closed)
			if deadline {
				failure(t, err, SentNothing, KindRefused) // the engine's failure, not the deadline's
			} else {
				failure(t, err, SentNothing, KindCanceled)
			}
		})
	}
}

func TestWaitsGrowAndAreCappedAndDiffer(t *testing.T) {
	p := NewRetrier(nil, RetryPolicy{}).policy
	assert.Equal(t, RetryPolicy{Max: 1, BackoffBase: 50 * time.Millisecond, BackoffMax: 2 * time.Second}, p)
	for n, limit := range []time.Duration{50, 100, 200, 400, 800, 1600, 2000, 2000} {
		limit *= time.Millisecond
		var longest time.Duration
		seen := map[time.Duration]bool{}
		for range 500 {
			w := p.wait(n)
			require.LessOrEqual(t, w, limit)
			require.GreaterOrEqual(t, w, time.Duration(0))
			longest = max(longest, w)
			seen[w] = true
		}
		assert.Greater(t, longest, limit*9/10, "the whole range is used")
		assert.Greater(t, len(seen), 400)
	}
	assert.LessOrEqual(t, p.wait(1<<40), 2*time.Second, "no overflow")
	assert.Zero(t, NewRetrier(nil, RetryPolicy{BackoffBase: -1}).policy.wait(3))
}

// go-retryablehttp closes its client's idle connections when it gives up: the pool of all other requests.
func TestGivingUpLeavesThePoolAlone(t *testing.T) {
	e := newEngine(t, keepAlive)
	tr := newTransport(t, nil)
	r := NewRetrier(tr, atOnce)
	nobody := "http://" + refusedAddress(t)
	for range 10 {
		resp, err := r.Do(t.Context(), post(t, e.url(), "x"))
		require.NoError(t, err)
		drain(t, resp)
		_, err = r.Do(t.Context(), post(t, nobody, "x"))
		require.Error(t, err)
	}
	assert.EqualValues(t, 1, e.accepted.Load(), "connections for ten good requests")
}

// A 5 MB prompt is read from where it lies, on the first try and on the next.
func TestBodiesAreSentAgainByteForByteAndNotCopied(t *testing.T) {
	const size = 5 << 20
	sum := make(chan [sha256.Size]byte, 1)
	buf := make([]byte, 64<<10)
	e := newEngine(t, func(_ *engine, c net.Conn) {
		r := bufio.NewReaderSize(c, 4<<10)
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		h := sha256.New()
		_, _ = io.CopyBuffer(struct{ io.Writer }{h}, req.Body, buf)
		_, _ = io.WriteString(c, okResponse)
		sum <- [sha256.Size]byte(h.Sum(nil))
	})
	body := make([]byte, size)
	for i := range body {
		body[i] = byte(i * i >> 7)
	}
	text := string(body)
	for name, open := range map[string]func() io.ReadCloser{
		"bytes that write themselves": func() io.ReadCloser { return io.NopCloser(bytes.NewReader(body)) },
		"text that writes itself":     func() io.ReadCloser { return io.NopCloser(strings.NewReader(text)) },
		"bytes that are read":         func() io.ReadCloser { return plainReader{bytes.NewReader(body)} },
	} {
		t.Run(name, func(t *testing.T) {
			dial, _ := refuseFirst(1)
			r := NewRetrier(newTransport(t, &Options{DialContext: dial}), atOnce)
			req, err := http.NewRequest(http.MethodPost, e.url(), open())
			require.NoError(t, err)
			req.ContentLength = size
			req.GetBody = func() (io.ReadCloser, error) { return open(), nil }

			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			resp, err := r.Do(t.Context(), req)
			require.NoError(t, err)
			got := <-sum
			runtime.ReadMemStats(&after)

			drain(t, resp)
			assert.Equal(t, sha256.Sum256(body), got)
			assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(512<<10), "bytes allocated for a 5 MB body")
		})
	}
}

// roundTripper stands for one of another package, such as instrumentation around a Transport.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestARoundTripperAroundATransportSeesEachTry(t *testing.T) {
	s := newServer(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	dial, _ := refuseFirst(2)
	tr := newTransport(t, &Options{DialContext: dial})
	type key struct{}
	var seen int
	r := NewRetrier(roundTripper(func(req *http.Request) (*http.Response, error) {
		seen++
		assert.Equal(t, "v", req.Context().Value(key{}))
		return tr.RoundTrip(req)
	}), atOnce)
	resp, err := r.Do(context.WithValue(t.Context(), key{}, "v"), post(t, s.URL, "x"))
	require.NoError(t, err)
	assert.Equal(t, "ok", drain(t, resp))
	assert.Equal(t, 3, seen)

	_, err = NewRetrier(roundTripper(func(*http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF }),
		atOnce).
		Do(t.Context(), post(t, s.URL, "x"))
	failure(t, err, SentMaybe, KindEOF)
}

func TestARequestWithoutBodyIsSentAgain(t *testing.T) {
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		assert.Zero(t, r.ContentLength)
		assert.Empty(t, r.TransferEncoding)
	})
	for _, body := range []io.Reader{nil, http.NoBody} {
		dial, _ := refuseFirst(1)
		req, err := http.NewRequest(http.MethodPost, s.URL, body)
		require.NoError(t, err)
		resp, err := NewRetrier(newTransport(t, &Options{DialContext: dial}), atOnce).Do(t.Context(), req)
		require.NoError(t, err)
		drain(t, resp)
	}
}
