// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow"
)

// A RoundTripper's user may give it any body.

// oddBody is a body of a host's own.
type oddBody struct {
	read   func(p []byte) (int, error)
	once   sync.Once
	closed chan struct{}
}

func newOddBody(read func([]byte) (int, error)) *oddBody {
	return &oddBody{read: read, closed: make(chan struct{})}
}

func (b *oddBody) Read(p []byte) (int, error) { return b.read(p) }
func (b *oddBody) Close() error               { b.once.Do(func() { close(b.closed) }); return nil }

func odd(ctx context.Context, t *testing.T, body io.ReadCloser) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://model.example/v1/completions", http.NoBody)
	require.NoError(t, err)
	r.Body, r.GetBody, r.ContentLength = body, nil, -1
	r.Header.Set("Content-Type", "application/json")
	return r
}

// As with net/http's own transport, the end of the request's context ends RoundTrip while the body blocks, and closes
// the body.
func TestABodyThatBlocksHoldsNoRoundTrip(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD))
	next := &http.Transport{}
	defer next.CloseIdleConnections()
	for _, length := range []int64{-1, 100} {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		body := newOddBody(nil)
		body.read = func([]byte) (int, error) { <-body.closed; return 0, errors.New("closed") }
		r := odd(ctx, t, body)
		r.ContentLength = length
		within(t, "RoundTrip", func() {
			resp, err := x.flow.RoundTripper(next).RoundTrip(r)
			if err == nil {
				_ = resp.Body.Close()
			}
			assert.ErrorIs(t, err, context.DeadlineExceeded)
		})
		_ = body.Close()
		cancel()
	}
}

func TestOddBodiesBehindTheRoundTripper(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD))
	next := &http.Transport{}
	defer next.CloseIdleConnections()
	rt := x.flow.RoundTripper(next)
	text := `{"prompt":"hi"}`
	for name, c := range map[string]struct {
		body   func() io.ReadCloser
		length int64
		status int
	}{
		"length not told":  {func() io.ReadCloser { return io.NopCloser(strings.NewReader(text)) }, 0, 200},
		"shorter":          {func() io.ReadCloser { return io.NopCloser(strings.NewReader(text)) }, 100, 400},
		"longer":           {func() io.ReadCloser { return io.NopCloser(strings.NewReader(text + text)) }, 15, 400},
		"longer by spaces": {func() io.ReadCloser { return io.NopCloser(strings.NewReader(text + "   ")) }, 15, 400},
		"fails": {func() io.ReadCloser {
			return newOddBody(func(p []byte) (int, error) { return copy(p, text), errors.New("no more") })
		}, -1, 400},
		"stands still": {func() io.ReadCloser {
			return newOddBody(func([]byte) (int, error) { return 0, nil })
		}, -1, 400},
		"none":  {func() io.ReadCloser { return nil }, 0, 400},
		"empty": {func() io.ReadCloser { return http.NoBody }, 0, 400},
	} {
		t.Run(name, func(t *testing.T) {
			r := odd(t.Context(), t, c.body())
			r.ContentLength = c.length
			resp, err := rt.RoundTrip(r)
			require.NoError(t, err)
			defer resp.Body.Close()
			got, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			assert.Equal(t, c.status, resp.StatusCode, "%s", got)
		})
	}
}

// A request without a URL or a header is an error or a response, and no panic; one with trailers and Expect is served.
func TestOddRequestsBehindTheRoundTripper(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD))
	next := &http.Transport{}
	defer next.CloseIdleConnections()
	rt := x.flow.RoundTripper(next)
	r := odd(t.Context(), t, io.NopCloser(strings.NewReader(`{"prompt":"hi"}`)))
	r.Header.Set("Expect", "100-continue")
	r.Trailer = http.Header{"X-Sum": {"1"}}
	for range 2 { // reused
		r.Body = io.NopCloser(bytes.NewReader([]byte(`{"prompt":"hi"}`)))
		resp, err := rt.RoundTrip(r)
		require.NoError(t, err)
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		assert.Equal(t, 200, resp.StatusCode)
	}
	r = odd(t.Context(), t, http.NoBody)
	r.Header = nil
	resp, err := rt.RoundTrip(r)
	if err == nil {
		_ = resp.Body.Close()
	}
	r = odd(t.Context(), t, http.NoBody)
	r.URL = nil
	resp, err = rt.RoundTrip(r)
	if err == nil {
		_ = resp.Body.Close()
	}
	require.Error(t, err)
	r = odd(t.Context(), t, http.NoBody)
	r.URL = &url.URL{Path: "/v1/completions"}
	resp, err = rt.RoundTrip(r)
	require.NoError(t, err)
	_ = resp.Body.Close()
}

// A body that never ends is refused after Timeouts.Body, as by ServeHTTP.
func TestABodyIsLateBehindTheRoundTripper(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD),
		pdflow.WithTimeouts(config.Timeouts{Body: 20 * time.Millisecond}))
	body, _ := io.Pipe()
	within(t, "RoundTrip", func() {
		resp, err := x.flow.RoundTripper(&http.Transport{}).RoundTrip(odd(t.Context(), t, body))
		if assert.NoError(t, err) {
			_ = resp.Body.Close()
			assert.Equal(t, http.StatusRequestTimeout, resp.StatusCode)
		}
	})
}

// A body that panics does so where its owner can recover from it.
func TestABodyThatPanicsBehindTheRoundTripper(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD))
	body := newOddBody(func([]byte) (int, error) { panic("no body") })
	assert.PanicsWithValue(t, "no body", func() {
		resp, err := x.flow.RoundTripper(&http.Transport{}).RoundTrip(odd(t.Context(), t, body))
		if err == nil {
			_ = resp.Body.Close()
		}
	})
	<-body.closed
}
