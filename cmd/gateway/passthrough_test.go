// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const passing = ", passthrough: decode, passthroughPaths: [/v1/redirect, /v1/hang, /v1/slow]"

func TestOtherPathsPassToADecodeEngine(t *testing.T) {
	g, p, d := startHTTP(t, passing, "")
	status, h, body := do(t, http.MethodPost, g.client+"/tokenize?x=1",
		`{"model":"m", "prompt": "x","kv_transfer_params":{"remote_host":"h"},"bootstrap_room":1,`+
			`"vllm_xargs":{"kv_transfer_params":{},"a":1}}`,
		"X-Request-Id", "mine", "Cookie", "a=b", "X-Data-Parallel-Rank", "3", "Authorization", "Bearer k",
		"Accept-Encoding", "gzip", "Connection", "X-Mine", "X-Mine", "1")
	assert.Equal(t, http.StatusOK, status, body)
	assert.Equal(t, []string{"aggregated", "mine", ""},
		[]string{h.Get("X-PD-Mode"), h.Get("X-Request-Id"), h.Get("Server")})
	got := d.last()
	assert.Equal(t, "/tokenize", got.path)
	assert.Equal(t, `{"model":"m", "prompt": "x","vllm_xargs":{"a":1}}`, got.body,
		"transfer members are never believed; the rest keeps its bytes")
	assert.Equal(t, "Bearer k", got.header.Get("Authorization"))
	assert.Equal(t, "mine", got.header.Get("X-Request-Id"))
	for _, name := range []string{"Cookie", "X-Data-Parallel-Rank", "Accept-Encoding", "X-Mine", "X-Forwarded-For",
		"Forwarded"} {
		assert.Empty(t, got.header.Values(name), name)
	}
	status, _, _ = do(t, http.MethodGet, g.client+"/v1/responses/resp_1", "")
	assert.Equal(t, http.StatusOK, status, "without a body")
	assert.Zero(t, p.count(), "prefill engines get none of it")
	status, _, _ = g.complete(completion)
	assert.Equal(t, http.StatusOK, status)
	assert.Equal(t, 1, p.count(), "what PD carries goes by PD")
}

func TestOrdersNeverReachAnEngine(t *testing.T) {
	g, p, d := startHTTP(t, passing, "")
	for _, line := range []string{"POST /sleep", "POST /v1/../sleep", "POST /v1/%2e%2e/sleep", "POST /v1//../sleep",
		"POST /v1/load_lora_adapter", "POST /v1/shutdown", "POST /v1/update_weights", "POST /v1/profile",
		"GET /v1/loads", "DELETE /v1/models/m",
		"POST /v1/%6coad_lora_adapter", "PATCH /v1/embeddings", "OPTIONS *", "GET /health", "TRACE /v1/models",
		"POST http://other/sleep"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(g.client, "http://"))
		require.NoError(t, err)
		fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: g\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", line)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err, line)
		_, _ = io.Copy(io.Discard, resp.Body)
		assert.Equal(t, http.StatusNotFound, resp.StatusCode, line)
		resp.Body.Close()
		conn.Close()
	}
	assert.Zero(t, p.count()+d.count())
}

func TestPassedRequestsThatAreRefused(t *testing.T) {
	p, d := newEngine(t), newEngine(t)
	g := start(t, gatewayYAML(passing+", maxBodyBytes: 100")+pairYAML("m", p, d, "")+pairYAML("n", p, d, ""))
	for name, c := range map[string]struct {
		body, contentType string
		status            int
		code              string
	}{
		"not JSON":        {`{`, "application/json", 400, "invalid_request"},
		"unknown model":   {`{"model":"x"}`, "application/json", 404, "not_found"},
		"no model of two": {`{}`, "application/json", 404, "not_found"},
		"too large":       {`{"model":"` + strings.Repeat("m", 100) + `"}`, "application/json", 413, "body_too_large"},
		"a form":          {`model=m`, "application/x-www-form-urlencoded", 415, "unsupported_media_type"},
	} {
		status, h, body := do(t, http.MethodPost, g.client+"/v1/embeddings", c.body, "Content-Type", c.contentType)
		assert.Equal(t, c.status, status, name)
		assert.Contains(t, body, `"code":"`+c.code+`"`, name)
		assert.Equal(t, "application/json", h.Get("Content-Type"), name)
		assert.Len(t, h.Values("X-Request-Id"), 1, name)
	}
	assert.Zero(t, p.count()+d.count())
}

func TestFaultsOfTheEngineThatWasPassedTo(t *testing.T) {
	p, d := newEngine(t), listenEngine(t, "127.0.0.1:"+unusedPort(t))
	g := start(t, gatewayYAML(passing)+pairYAML("m", p, d, ""))
	impatient := start(t, gatewayYAML(passing)+pairYAML("m", p, d, "  kvConnector: {timeouts: {decode: 150ms}}\n"))
	status, _, body := do(t, http.MethodPost, g.client+"/v1/redirect", `{}`)
	assert.Equal(t, http.StatusBadGateway, status, "redirects are not followed")
	assert.NotContains(t, body, "127.0.0.1", "no addresses in responses")
	status, _, body = do(t, http.MethodPost, impatient.client+"/v1/hang", `{}`)
	assert.Equal(t, http.StatusGatewayTimeout, status, body)
	d.CloseClientConnections()
	d.Listener.Close()
	status, _, body = do(t, http.MethodPost, g.client+"/v1/embeddings", `{}`)
	assert.Contains(t, []int{http.StatusBadGateway, http.StatusServiceUnavailable}, status)
	assert.NotContains(t, body, "127.0.0.1")
}

// Streams come as they are.
func TestADrainWaitsForPassedRequestsToo(t *testing.T) {
	g, _, d := startHTTP(t, passing, "")
	hold := d.holds()
	s := g.stream("/v1/embeddings", `{"stream":true}`)
	line, err := s.r.ReadString('\n')
	require.NoError(t, err)
	assert.Contains(t, line, "data: ", "the first event comes before the last")
	g.signal()
	g.logs(1, "draining")
	time.Sleep(50 * time.Millisecond)
	close(hold)
	assert.Equal(t, "data: [DONE]", s.rest(t))
	g.ended(exitOK)
}

// 0 in the file is no limit, and not the end at once.
func TestPassedRequestsWithoutLimits(t *testing.T) {
	g, _, _ := startHTTP(t, passing, "  kvConnector: {timeouts: {decode: 0s, idle: 0s}}\n")
	for range 3 {
		status, _, body := do(t, http.MethodPost, g.client+"/v1/embeddings", `{}`)
		assert.Equal(t, http.StatusOK, status, body)
	}
}

// Engines that want a key get that of Anthropic's clients, too, whatever the path, and what the configuration names.
func TestEnginesThatWantAKeyGetIt(t *testing.T) {
	wants := func() *engine {
		e := newEngine(t, "m")
		e.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h := r.Header
			known := h.Get("X-Api-Key") == "sk" && h.Get("X-Tenant") == "t" && h.Get("Cookie") == ""
			api := h.Get("Anthropic-Version") + h.Get("Anthropic-Beta") + h.Get("Openai-Organization") +
				h.Get("Openai-Project")
			if r.URL.Path != "/health" && (!known || r.Method == http.MethodPost && api != "2023-06-01toolsorgp") {
				http.Error(w, "", http.StatusUnauthorized)
				return
			}
			e.ServeHTTP(w, r)
		})
		return e
	}
	p, d := wants(), wants()
	g := start(t, gatewayYAML(passing+", forwardHeaders: [x-tenant]")+pairYAML("m", p, d, ""))
	for _, path := range []string{"/v1/messages", "/v1/chat/completions", "/v1/messages/count_tokens"} {
		status, _, body := do(t, http.MethodPost, g.client+path,
			`{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}`, "X-Api-Key", "sk",
			"anthropic-version", "2023-06-01", "anthropic-beta", "tools", "OpenAI-Organization", "org",
			"OpenAI-Project", "p", "X-Tenant", "t", "Cookie", "a=b")
		assert.Equal(t, http.StatusOK, status, "%s: %s", path, body)
	}
	_, _, list := do(t, http.MethodGet, g.client+modelsPath, "", "X-Api-Key", "sk", "X-Tenant", "t")
	assert.Contains(t, list, `"id":"m"`)
}

// What a client may not say to a connector, it may not say beside it.
func TestMembersOfTheConnectorDoNotPass(t *testing.T) {
	g, _, d := startHTTP(t, passing, "  kvConnector: {type: sglang}\n")
	status, _, body := do(t, http.MethodPost, g.client+"/v1/embeddings",
		`{"input":"x","data_parallel_rank":3,"bootstrap_room":1}`)
	assert.Equal(t, http.StatusOK, status, body)
	assert.Equal(t, `{"input":"x"}`, d.last().body)
}

// Audio comes as a form, which goes to an engine of the model that it names. There is no WebSocket.
func TestAudioPassesAsAForm(t *testing.T) {
	p, d, other := newEngine(t), newEngine(t), newEngine(t)
	g := start(t, gatewayYAML(passing+", maxBodyBytes: 1000")+pairYAML("m", p, d, "")+
		pairYAML("whisper", p, other, ""))
	send := func(field, value, audio string) (int, string, string) {
		var b strings.Builder
		form := multipart.NewWriter(&b)
		file, err := form.CreateFormFile("file", "speech.wav")
		require.NoError(t, err)
		_, err = io.WriteString(file, audio)
		require.NoError(t, err)
		require.NoError(t, errors.Join(form.WriteField("model", "whisper"), form.WriteField(field, value),
			form.Close()))
		status, _, body := do(t, http.MethodPost, g.client+"/v1/audio/transcriptions", b.String(), "Content-Type",
			form.FormDataContentType())
		return status, body, b.String()
	}
	status, body, sent := send("response_format", "json", "RIFF\x00\xff")
	assert.Equal(t, http.StatusOK, status, body)
	assert.Equal(t, sent, other.last().body)
	status, body, _ = send("kv_transfer_params", `{"remote_host":"h"}`, "RIFF")
	assert.Equal(t, http.StatusBadRequest, status)
	assert.Contains(t, body, `"param":"kv_transfer_params"`)
	status, _, _ = send("response_format", "json", strings.Repeat("x", 1000))
	assert.Equal(t, http.StatusRequestEntityTooLarge, status)
	for _, upgrade := range []string{"websocket", ""} {
		status, _, body = do(t, http.MethodGet, g.client+"/v1/realtime?model=m", "", "Connection", "Upgrade", "Upgrade",
			upgrade)
		assert.Equal(t, http.StatusBadRequest, status)
		assert.Contains(t, body, "WebSocket")
	}
	assert.Zero(t, p.count()+d.count())
	assert.Equal(t, 1, other.count())
}

// A list of engines that stands in the file is known when the gateway says that it serves.
func TestTheFirstRequestFindsListedEngines(t *testing.T) {
	p, d := newEngine(t), newEngine(t)
	for range 20 {
		g := start(t, gatewayYAML(passing)+pairYAML("m", p, d, ""))
		status, _, body := do(t, http.MethodPost, g.client+"/v1/embeddings", `{"input":"x"}`)
		require.Equal(t, http.StatusOK, status, body)
	}
}
