// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/go-chi/chi/v5/middleware"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
)

func TestMain(m *testing.M) {
	quiet := &middleware.DefaultLogFormatter{Logger: log.New(io.Discard, "", 0)}
	middleware.DefaultLogger = middleware.RequestLogger(quiet)
	goleak.VerifyTestMain(m)
}

// world is a pair of engines behind the chi router.
type world struct {
	p, d *enginesim.Engine
	url  string
}

func start(t *testing.T, o options) *world {
	t.Helper()
	p, d, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	o.prefill, o.decode, o.keys = p.URL(), d.URL(), []string{"secret"}
	if o.burst == 0 {
		o.rate, o.burst = 1000, 1000
	}
	flow, err := newFlow(&o)
	require.NoError(t, err)
	require.NoError(t, flow.Ready(t.Context()))
	server := httptest.NewUnstartedServer(handler(flow, &o))
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		last, stop := context.WithTimeout(context.Background(), 20*time.Second)
		defer stop()
		require.NoError(t, flow.Shutdown(last))
	})
	return &world{p, d, server.URL}
}

func body(stream bool) string {
	prompt := strings.Repeat("a cat on a mat that ", 40)
	return fmt.Sprintf(`{"model":"tiny","prompt":"%s","max_tokens":12,"temperature":0,"stream":%t}`,
		prompt, stream)
}

func httpClient(second bool) *http.Client {
	tr := &http.Transport{DisableKeepAlives: true, Protocols: new(http.Protocols)}
	tr.Protocols.SetHTTP1(!second)
	tr.Protocols.SetUnencryptedHTTP2(second)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

func (w *world) post(t *testing.T, c *http.Client, path, body string, header ...string) (
	status int, h http.Header, text string, err error,
) {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, w.url+path, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	defer c.CloseIdleConnections()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, string(b), err
}

func TestTheFlowServesUnderItsPrefix(t *testing.T) {
	for _, second := range []bool{false, true} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("HTTP/2 %t, stream %t", second, stream), func(t *testing.T) {
				w := start(t, options{})
				status, h, text, err := w.post(t, httpClient(second), prefix+"/v1/completions", body(stream),
					"Authorization", "Bearer secret")
				require.NoError(t, err)
				require.Equal(t, http.StatusOK, status, text)
				assert.Equal(t, "disaggregated", h.Get("X-Pd-Mode"))
				assert.Equal(t, stream, strings.HasSuffix(text, "data: [DONE]\n\n"), text)
				assert.Positive(t, w.d.Stats().ExternalKVTransfer, "decode computed the prompt itself")
				id := h.Get("X-Request-Id")
				assert.Regexp(t, `:.*-\d{6}$`, id, "not the ID that chi made")
				assert.Equal(t, id, w.d.Requests()[0].Header.Get("X-Request-Id"))
			})
		}
	}
}

func TestWhatIsNotTheFlows(t *testing.T) {
	w := start(t, options{})
	c := httpClient(false)
	resp, err := c.Get(w.url + "/healthz")
	require.NoError(t, err)
	resp.Body.Close()
	assert.Equal(t, http.StatusOK, resp.StatusCode)
	for path, want := range map[string]int{"/v1/completions": 404, prefix + "/v1/nothing": 404, prefix: 404} {
		status, _, text, _ := w.post(t, c, path, body(false), "Authorization", "Bearer secret")
		assert.Equal(t, want, status, "%s: %s", path, text)
	}
}

func TestTheKeyEndsAtTheRouterUnlessItIsForwarded(t *testing.T) {
	for _, forward := range []bool{false, true} {
		w := start(t, options{forwardKey: forward})
		for i, header := range [][2]string{{"Authorization", "Bearer secret"}, {"X-Api-Key", "secret"}} {
			status, _, text, _ := w.post(t, httpClient(false), prefix+"/v1/completions", body(false), header[0],
				header[1])
			require.Equal(t, http.StatusOK, status, text)
			for _, e := range []*enginesim.Engine{w.p, w.d} {
				sent := e.Requests()[i].Header
				assert.Equal(t, forward, sent.Get(header[0]) == header[1], "%s, forward %t", header[0], forward)
			}
		}
		wrong := [][2]string{{"Authorization", "Bearer wrong"}, {"Authorization", "secret"}, {"X-Api-Key", ""}}
		for _, header := range wrong {
			status, _, text, _ := w.post(t, httpClient(false), prefix+"/v1/completions", body(false), header[0],
				header[1])
			require.Equal(t, http.StatusUnauthorized, status)
			assert.Equal(t, "authentication_error", gjson.Get(text, "error.type").String())
		}
		assert.Len(t, w.p.Requests(), 2)
	}
}

func TestAClientIsLimited(t *testing.T) {
	w := start(t, options{rate: 0.001, burst: 2})
	for i, want := range []int{200, 200, 429} {
		status, h, text, _ := w.post(t, httpClient(false), prefix+"/v1/completions", body(false),
			"Authorization", "Bearer secret")
		require.Equal(t, want, status, text)
		assert.Equal(t, i == 2, h.Get("Retry-After") == "1")
	}
}

func TestACutStreamHasNoEnd(t *testing.T) {
	w := start(t, options{})
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
	w.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3})
	_, err = fmt.Fprintf(conn, "POST %s/v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"+
		"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", prefix, len(body(true)), body(true))
	require.NoError(t, err)
	all, _ := io.ReadAll(conn)
	assert.Contains(t, string(all), "data: {")
	assert.NotContains(t, string(all), "[DONE]")
	assert.NotContains(t, string(all), "\r\n0\r\n", "the last chunk came")

	for _, second := range []bool{false, true} {
		w.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3})
		_, _, text, err := w.post(t, httpClient(second), prefix+"/v1/completions", body(true),
			"Authorization", "Bearer secret")
		require.Error(t, err, text)
		assert.Contains(t, text, "data: {")
	}
}
