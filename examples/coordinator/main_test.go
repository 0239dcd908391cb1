// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is two engines, a gateway that routes to them by header, and the coordinator before that gateway.
type world struct {
	p, d   *enginesim.Engine
	c      *coordinator
	url    string
	client *http.Client
	mu     sync.Mutex
	pools  []string // what the gateway was asked for, in order
}

func start(t *testing.T, decode enginesim.Config) *world {
	t.Helper()
	w := &world{}
	var err error
	w.p, w.d, err = enginesim.Pair(enginesim.Config{}, decode)
	require.NoError(t, err)
	t.Cleanup(func() { _ = w.p.Close(); _ = w.d.Close() })
	gateway := httptest.NewServer(w.gateway(t))
	t.Cleanup(gateway.Close)
	w.c, err = newCoordinator(gateway.URL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = w.c.send.Close() })
	server := httptest.NewServer(w.c)
	w.url, w.client = server.URL, server.Client()
	t.Cleanup(func() {
		server.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		assert.NoError(t, w.c.flow.Shutdown(ctx), "every request has ended")
	})
	return w
}

// gateway is the other gateway: a reverse proxy that knows the engines of each pool.
func (w *world) gateway(t *testing.T) http.Handler {
	t.Helper()
	pools := map[string]*url.URL{}
	for name, e := range map[string]*enginesim.Engine{"prefill": w.p, "decode": w.d} {
		u, err := url.Parse(e.URL())
		require.NoError(t, err)
		pools[name] = u
	}
	engines := &http.Transport{}
	t.Cleanup(engines.CloseIdleConnections)
	proxy := &httputil.ReverseProxy{
		Transport:     engines,
		FlushInterval: -1,
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(pools[r.In.Header.Get(poolHeader)]) },
	}
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.pools = append(w.pools, r.Header.Get(poolHeader))
		w.mu.Unlock()
		if pools[r.Header.Get(poolHeader)] == nil {
			http.Error(rw, "no such pool", http.StatusMisdirectedRequest)
			return
		}
		// Else net/http's server takes the body's end from the proxy where an answer begins before it was read, and the
		// proxy closes its connection to the engine in mid-stream.
		_ = http.NewResponseController(rw).EnableFullDuplex()
		proxy.ServeHTTP(rw, r)
	})
}

func (w *world) asked() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.pools...)
}

func (w *world) post(t *testing.T, ctx context.Context, path, body string) (*http.Response, error) {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url+path, strings.NewReader(body))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	return w.client.Do(r)
}

const (
	whole    = `{"prompt":"Two engines, one response.","max_tokens":8}`
	streamed = `{"prompt":"Two engines, one response.","max_tokens":8,"stream":true}`
)

func TestBothLegsGoThroughTheGateway(t *testing.T) {
	for name, body := range map[string]string{"whole": whole, "streamed": streamed} {
		t.Run(name, func(t *testing.T) {
			w := start(t, enginesim.Config{})
			resp, err := w.post(t, t.Context(), "/v1/completions", body)
			require.NoError(t, err)
			defer resp.Body.Close()
			got, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			assert.Equal(t, 200, resp.StatusCode)
			if body == streamed {
				assert.True(t, strings.HasSuffix(string(got), "data: [DONE]\n\n"))
			}
			assert.Equal(t, []string{"prefill", "decode"}, w.asked())
			assert.Zero(t, w.d.Stats().LocalCompute, "decode takes the KV over")
			assert.NoError(t, w.p.CheckKV())
			assert.NoError(t, w.d.CheckKV())
		})
	}
}

func TestErrorsReachTheClient(t *testing.T) {
	w := start(t, enginesim.Config{})
	w.p.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Count: -1})
	for path, c := range map[string]struct {
		body   string
		status int
		code   string
	}{
		"/v1/completions":      {streamed, 502, "prefill_failed"},
		"/v1/chat/completions": {`[]`, 400, "invalid_request"},
		"/v1/models":           {whole, 404, "not_found"},
	} {
		resp, err := w.post(t, t.Context(), path, c.body)
		require.NoError(t, err)
		got, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		assert.Equal(t, c.status, resp.StatusCode)
		assert.Equal(t, c.code, gjson.GetBytes(got, "error.code").String(), string(got))
	}
	assert.Equal(t, []string{"prefill", "prefill"}, w.asked(), "one attempt more, and no decode")
}

func TestAStreamThatBreaksIsCut(t *testing.T) {
	w := start(t, enginesim.Config{})
	w.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3, Count: -1}) // of a second attempt, too
	resp, err := w.post(t, t.Context(), "/v1/completions", streamed)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if resp.StatusCode != http.StatusBadGateway { // the reset may also overtake what was sent before it
		require.Error(t, err, "status %d: %s", resp.StatusCode, body)
	}
}

func TestAClientThatLeavesEndsTheLeg(t *testing.T) {
	w := start(t, enginesim.Config{ITL: time.Second})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	resp, err := w.post(t, ctx, "/v1/completions", streamed)
	require.NoError(t, err)
	defer resp.Body.Close()
	_, err = io.ReadFull(resp.Body, make([]byte, 10))
	require.NoError(t, err)
	cancel()
	require.Eventually(t, func() bool { return w.d.Stats().Aborted == 1 }, 20*time.Second, 5*time.Millisecond)
}
