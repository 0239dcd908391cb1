// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

func TestMain(m *testing.M) {
	gin.SetMode(gin.TestMode)
	gin.DefaultWriter, gin.DefaultErrorWriter = io.Discard, io.Discard
	goleak.VerifyTestMain(m)
}

// world is a pair of engines behind the gin router.
type world struct {
	p, d *enginesim.Engine
	url  string
}

// start starts a server with gin's handler as around wraps it, over HTTP/1 and over HTTP/2 without TLS.
func start(t *testing.T, o options, around func(http.Handler) http.Handler) *world {
	t.Helper()
	port, err := freeport.Find(1) // which nobody takes when the engine has ended
	require.NoError(t, err)
	p, d, err := enginesim.Pair(enginesim.Config{Listen: "127.0.0.1:" + strconv.Itoa(port)}, enginesim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	o.prefill = append(o.prefill, strings.TrimPrefix(p.URL(), "http://"))
	o.decode, o.keys = []string{strings.TrimPrefix(d.URL(), "http://")}, []string{"secret"}
	if o.burst == 0 {
		o.rate, o.burst = 1000, 1000
	}
	r, err := newRouter(&o)
	require.NoError(t, err)
	server := httptest.NewUnstartedServer(around(r.handler(&o)))
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
		ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
		defer stop()
		require.NoError(t, r.flow.Shutdown(ctx))
	})
	return &world{p, d, server.URL}
}

func plain(h http.Handler) http.Handler { return h }

func body(stream bool) string {
	prompt := strings.Repeat("a cat on a mat that ", 40)
	return fmt.Sprintf(`{"model":"tiny","prompt":"%s","max_tokens":12,"temperature":0,`+
		`"seed":9007199254740993,"stream":%t}`,
		prompt, stream)
}

func client(second bool) *http.Client {
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

func TestARequestIsServedByThePair(t *testing.T) {
	for _, second := range []bool{false, true} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprintf("HTTP/2 %t, stream %t", second, stream), func(t *testing.T) {
				w := start(t, options{}, plain)
				status, h, text, err := w.post(t, client(second), "/v1/completions", body(stream),
					"Authorization", "Bearer secret", "X-Request-Id", "mine")
				require.NoError(t, err)
				require.Equal(t, http.StatusOK, status, text)
				assert.Equal(t, "disaggregated", h.Get("X-Pd-Mode"))
				assert.Equal(t, "mine", h.Get("X-Request-Id"))
				assert.Equal(t, stream, strings.HasSuffix(text, "data: [DONE]\n\n"), text)
				assert.Positive(t, w.d.Stats().ExternalKVTransfer, "decode computed the prompt itself")
				assert.Equal(t, "9007199254740993", gjson.GetBytes(w.d.Requests()[0].Body, "seed").Raw,
					"a number lost digits")
			})
		}
	}
}

func TestTheKeyEndsAtTheRouterUnlessItIsForwarded(t *testing.T) {
	for _, forward := range []bool{false, true} {
		w := start(t, options{forwardKey: forward}, plain)
		for i, header := range [][2]string{{"Authorization", "Bearer secret"}, {"X-Api-Key", "secret"}} {
			status, _, text, _ := w.post(t, client(false), "/v1/completions", body(false), header[0], header[1])
			require.Equal(t, http.StatusOK, status, text)
			for _, e := range []*enginesim.Engine{w.p, w.d} {
				sent := e.Requests()[i].Header
				assert.Equal(t, forward, sent.Get(header[0]) == header[1], "%s, forward %t", header[0], forward)
			}
		}
		wrong := [][2]string{{"Authorization", "Bearer wrong"}, {"Authorization", "secret"}, {"X-Api-Key", ""}}
		for _, header := range wrong {
			status, _, text, _ := w.post(t, client(false), "/v1/completions", body(false), header[0], header[1])
			require.Equal(t, http.StatusUnauthorized, status)
			assert.Equal(t, "authentication_error", gjson.Get(text, "error.type").String())
		}
		assert.Len(t, w.p.Requests(), 2)
	}
}

func TestAClientIsLimited(t *testing.T) {
	w := start(t, options{rate: 0.001, burst: 2}, plain)
	for i, want := range []int{200, 200, 429} {
		status, h, text, _ := w.post(t, client(false), "/v1/completions", body(false), "Authorization", "Bearer secret")
		require.Equal(t, want, status, text)
		assert.Equal(t, i == 2, h.Get("Retry-After") == "1")
	}
}

func TestAnotherPairServesWhatTheFirstCouldNot(t *testing.T) {
	const dead = "127.0.0.1:1" // which nobody takes meanwhile
	w := start(t, options{prefill: []string{dead}}, plain)
	for range 2 { // one of them meets the dead engine first
		status, _, text, _ := w.post(t, client(false), "/v1/completions", body(false), "Authorization", "Bearer secret")
		require.Equal(t, http.StatusOK, status, text)
	}
	require.NoError(t, w.p.Close())
	status, h, text, _ := w.post(t, client(false), "/v1/completions", body(false), "Authorization", "Bearer secret")
	require.Equal(t, http.StatusBadGateway, status, text)
	assert.NotEmpty(t, h.Get("X-Request-Id"))
	assert.Equal(t, "prefill_failed", gjson.Get(text, "error.code").String())
}

func TestFaultsOfTheClient(t *testing.T) {
	w := start(t, options{}, plain)
	for _, c := range []struct{ path, body, kind string }{
		{"/v1/completions", `{"prompt":`, "invalid_request_error"},
		{"/v1/completions", `[]`, "invalid_request_error"},
		{"/v1/completions", `{} {}`, "invalid_request_error"},
		{"/v1/messages", `{"max_tokens":-1,"messages":[]}`, "invalid_request_error"},
	} {
		status, _, text, _ := w.post(t, client(false), c.path, c.body, "Authorization", "Bearer secret")
		assert.Equal(t, http.StatusBadRequest, status, text)
		assert.Equal(t, c.kind, gjson.Get(text, "error.type").String(), text)
		assert.Equal(t, c.path == "/v1/messages", gjson.Get(text, "type").String() == "error")
	}
}

// hiding is a middleware whose writer has no Unwrap, as those that keep a copy of the response often have.
func hiding(h http.Handler) http.Handler {
	engine := gin.New()
	engine.Use(func(c *gin.Context) { c.Writer = struct{ gin.ResponseWriter }{c.Writer} })
	engine.NoRoute(func(c *gin.Context) {
		c.Status(http.StatusOK)
		h.ServeHTTP(c.Writer, c.Request)
	})
	return engine
}

func TestACutStreamHasNoEnd(t *testing.T) {
	w := start(t, options{}, plain)
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
	w.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3})
	_, err = fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"+
		"Content-Length: %d\r\n\r\n%s", len(body(true)), body(true))
	require.NoError(t, err)
	all, _ := io.ReadAll(conn)
	assert.Contains(t, string(all), "data: {")
	assert.NotContains(t, string(all), "[DONE]")
	assert.NotContains(t, string(all), "\r\n0\r\n", "the last chunk came")

	for _, second := range []bool{false, true} {
		w.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3})
		_, _, text, err := w.post(t, client(second), "/v1/completions", body(true), "Authorization", "Bearer secret")
		require.Error(t, err, text)
		assert.Contains(t, text, "data: {")
	}
}
