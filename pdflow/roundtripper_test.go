// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// behind posts a body through an http.Client whose transport is the flow.
func behind(ctx context.Context, t *testing.T, x *scripted, path, body string) (*http.Response, error) {
	t.Helper()
	next := &http.Transport{DisableCompression: true}
	t.Cleanup(next.CloseIdleConnections)
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://model.example"+path, strings.NewReader(body))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-Request-Id", "mine")
	return (&http.Client{Transport: x.flow.RoundTripper(next)}).Do(r)
}

func TestAClientBehindTheRoundTripper(t *testing.T) {
	for name, order := range map[string]connector.Order{"serial": connector.PrefillThenDecode,
		"together": connector.Together} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{order: order}, answer(ok), answer(`{"choices":[{"text":"from D"}]}`))
			resp, err := behind(context.Background(), t, x, "/v1/completions", `{"prompt":"hi"}`)
			require.NoError(t, err)
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			assert.JSONEq(t, `{"choices":[{"text":"from D"}]}`, string(body))
			assert.EqualValues(t, len(body), resp.ContentLength)
			assert.Equal(t, "disaggregated", resp.Header.Get("X-PD-Mode"))
			assert.Equal(t, "mine", resp.Header.Get("X-Request-Id"))
		})
	}
}

// If a request fails, RoundTrip returns the same error response that ServeHTTP would write. It returns an error only if
// the request was cancelled.
func TestFaultsBehindTheRoundTripperAreResponses(t *testing.T) {
	x := script(t, &fake{}, status(http.StatusBadGateway), answer(ok))
	for name, body := range map[string]string{"engine": `{"prompt":"hi"}`, "client": `{`} {
		resp, err := behind(context.Background(), t, x, "/v1/completions", body)
		require.NoError(t, err, name)
		got, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		_ = resp.Body.Close()
		want := post(t, x.url, "/v1/completions", body)
		assert.Equal(t, want.status, resp.StatusCode, name)
		assert.JSONEq(t, want.body, string(got), name)
		assert.Equal(t, want.header.Get("Content-Type"), resp.Header.Get("Content-Type"), name)
	}
	waiting := script(t, &fake{}, gone, answer(ok))
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		for waiting.all() == "" { // until P has the request
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	resp, err := behind(ctx, t, waiting, "/v1/completions", `{"prompt":"hi"}`)
	if err == nil {
		_ = resp.Body.Close()
	}
	require.ErrorIs(t, err, context.Canceled)
}

func TestACutStreamBehindTheRoundTripperIsAnUnexpectedEnd(t *testing.T) {
	cut := func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	x := script(t, &fake{}, answer(ok), cut)
	resp, err := behind(context.Background(), t, x, "/v1/completions", `{"prompt":"hi","stream":true}`)
	require.NoError(t, err)
	defer resp.Body.Close()
	_, err = io.ReadAll(resp.Body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

// Requests that are not inference go to next, unchanged.
func TestOtherPathsGoToNext(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(ok))
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.Method+" "+r.URL.Path)
	}))
	defer other.Close()
	next := &http.Transport{}
	defer next.CloseIdleConnections()
	c := &http.Client{Transport: x.flow.RoundTripper(next)}
	for _, r := range []struct{ method, path string }{{"GET", "/v1/models"}, {"GET", "/v1/completions"},
		{"POST", "/tokenize"}} {
		req, err := http.NewRequest(r.method, other.URL+r.path, http.NoBody)
		require.NoError(t, err)
		resp, err := c.Do(req)
		require.NoError(t, err)
		body, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		assert.Equal(t, r.method+" "+r.path, string(body))
	}
	assert.Empty(t, x.all(), "no engine was asked")
}

// The reverse proxy of the standard library works with the flow as its Transport, as the documentation shows.
func TestAReverseProxyOverTheRoundTripper(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(`{"choices":[{"text":"from D"}]}`))
	next := &http.Transport{}
	t.Cleanup(next.CloseIdleConnections)
	target, err := url.Parse("http://model.example")
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.Transport = x.flow.RoundTripper(next)
	got := post(t, serve(t, proxy), "/v1/completions", `{"prompt":"hi"}`)
	assert.Equal(t, http.StatusOK, got.status)
	assert.Contains(t, got.body, "from D")
	assert.Equal(t, string(pdflow.ModeDisaggregated), got.header.Get("X-PD-Mode"))
}
