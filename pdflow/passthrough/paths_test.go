// SPDX-License-Identifier: Apache-2.0

package passthrough_test

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/passthrough"
)

// served reports whether a handler takes a request, or leaves it to the next one.
func served(t *testing.T, h *passthrough.Handler, method, target string) bool {
	t.Helper()
	path, query, _ := strings.Cut(target, "?")
	u, err := url.Parse("http://gateway" + path)
	require.NoError(t, err, target)
	u.RawQuery = query
	r := httptest.NewRequest(method, "/", nil)
	r.URL = u
	taken := true
	h.Middleware(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { taken = false })).
		ServeHTTP(httptest.NewRecorder(), r)
	return taken
}

func TestOnlyServingPathsPass(t *testing.T) {
	h := handler(t, unknown, nil)
	for _, target := range []string{
		"/tokenize", "/detokenize", "/score", "/rerank", "/pooling", "/v1/embeddings",
		"/v1/models/meta-llama/Llama-3.1-8B",
		"/v1/responses/resp_1/cancel", "/v1/messages/count_tokens", "/v1/embeddings?x=/sleep",
	} {
		assert.True(t, served(t, h, http.MethodPost, target), target)
	}
	for _, target := range []string{
		"/", "/v1", "/v1/", "/v2/x", "/health", "/metrics", "/version", "/load", "/tokenizer_info", "/abort_requests",
		"/inference/v1/abort_requests", "/v1/abort_requests", "/reset_prefix_cache", "/sleep", "/sleep?level=1",
		"/wake_up",
		"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/V1/LOAD_LORA_ADAPTER", "/v1/Load_Lora_Adapter",
		"/v1/load-lora-adapter", "/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/..%2fsleep", "/v1//sleep", "//v1/embeddings",
		"/v1/./sleep", "/v1/%6coad_lora_adapter", "/v1/load%5florа_adapter", "/v1/embeddings/", "/v1/embeddings;/sleep",
		"/v1/x/../../sleep", "/tokenize/../sleep", "/v1/a%00b", `/v1/..\sleep`, "/v1/models/%73leep", "/v1/models%2Fx",
		"/v1/embe%64dings",
	} {
		assert.False(t, served(t, h, http.MethodPost, target), target)
	}
	for method, want := range map[string]bool{
		"GET": true, "HEAD": true, "POST": true, "DELETE": true, "PUT": false, "PATCH": false, "OPTIONS": false,
		"TRACE": false, "CONNECT": false, "get": false, "PRI": false,
	} {
		assert.Equal(t, want, served(t, h, method, "/v1/embeddings"), method)
	}
}

// The handler refuses inference paths even if no flow is in front of it: otherwise prompts would reach an engine
// without the flow's checks.
func TestInferenceIsNotServed(t *testing.T) {
	h := handler(t, unknown, nil)
	for _, path := range []string{
		"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate",
		"/generate",
	} {
		assert.False(t, served(t, h, http.MethodPost, path), path)
	}
	assert.True(t, served(t, h, http.MethodGet, "/v1/responses/resp_1"))
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(`{}`)))
	assert.Equal(t, http.StatusNotFound, w.Code)
	assert.Contains(t, w.Body.String(), `"code":"not_found"`)
	assert.Len(t, w.Header().Values("X-Request-Id"), 1)
}

func TestAPolicyNarrowsWhatPasses(t *testing.T) {
	asked := []string{}
	h := handler(t, unknown, &passthrough.Options{Allow: func(r *http.Request) bool {
		asked = append(asked, r.URL.Path)
		return r.URL.Path == "/tokenize"
	}})
	assert.True(t, served(t, h, http.MethodPost, "/tokenize"))
	assert.False(t, served(t, h, http.MethodPost, "/v1/embeddings"))
	assert.False(t, served(t, h, http.MethodGet, "/v1/models"), "the list of models is a path as others are")
	assert.False(t, served(t, h, http.MethodPost, "/sleep"))
	assert.Equal(t, []string{"/tokenize", "/v1/embeddings", "/v1/models"}, asked,
		"what never passes is not up to a policy")
}
