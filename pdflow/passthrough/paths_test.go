// SPDX-License-Identifier: Apache-2.0

package passthrough_test

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
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

func TestWhatPassesIsListed(t *testing.T) {
	h := handler(t, unknown, nil)
	for method, targets := range map[string][]string{
		"GET": {"/v1/models", "/v1/models/meta-llama/Llama-3.1-8B", "/v1/models/meta-llama%2FLlama-3.1-8B",
			"/v1/models/load-test", "/v1/responses/resp_1", "/v1/responses/resp_1/input_items"},
		"HEAD":   {"/v1/models", "/v1/responses/resp_1"},
		"DELETE": {"/v1/responses/resp_1"},
		"POST": {"/v1/responses/resp_1/cancel", "/v1/messages/count_tokens", "/v1/chat/completions/render",
			"/v1/completions/derender", "/v1/audio/transcriptions", "/v1/embeddings", "/v1/embeddings?x=/sleep",
			"/v1/score", "/v1/rerank", "/v1/tokenize", "/tokenize", "/detokenize", "/score", "/rerank", "/pooling"},
	} {
		for _, target := range targets {
			assert.True(t, served(t, h, method, target), "%s %s", method, target)
		}
	}
	for _, target := range []string{
		"/", "/v1", "/v1/", "/v2/x", "/v1/other", "/health", "/metrics", "/version", "/load", "/tokenizer_info",
		"/v1/../sleep", "/v1/%2e%2e/sleep", "/v1/..%2fsleep", "/v1//sleep", "//v1/embeddings", "/v1/./sleep",
		"/v1/%6coad_lora_adapter", "/v1/load%5florа_adapter", "/v1/embeddings/", "/v1/embeddings;/sleep",
		"/v1/x/../../sleep", "/tokenize/../sleep", "/v1/a%00b", `/v1/..\sleep`, "/v1/audio/..", "/v1/audio/%73leep",
		"/v1/audio%2Fx", "/v1/audio", "/v1/embe%64dings", "/v1/Embeddings", "/V1/embeddings", "/v1/responses/cancel",
		"/v1/responses/resp_1/x/cancel", "/v1/chat/completions/batch", "/v1/realtime",
	} {
		assert.False(t, served(t, h, http.MethodPost, target), target)
	}
	for method, want := range map[string]bool{
		"GET": false, "HEAD": false, "POST": true, "DELETE": false, "PUT": false, "PATCH": false, "OPTIONS": false,
		"TRACE": false, "CONNECT": false, "post": false, "PRI": false,
	} {
		assert.Equal(t, want, served(t, h, method, "/v1/embeddings"), method)
	}
	for _, target := range []string{"/v1/models/..%2f..%2fsleep", "/v1/models/a%2F%2Fb", "/v1/models/a%2F",
		"/v1/models/%61", "/v1/models/a%252Fb", "/v1/models%2Fa"} {
		assert.False(t, served(t, h, http.MethodGet, target), target)
	}
	for _, method := range []string{"POST", "DELETE", "PUT"} {
		assert.False(t, served(t, h, method, "/v1/models/m"), "%s could unload it", method)
	}
}

// The gateway's page lists what passes.
func TestThePageListsWhatPasses(t *testing.T) {
	page, err := os.ReadFile("../../cmd/gateway/README.md")
	require.NoError(t, err)
	_, table, found := strings.Cut(string(page), "| method | path |\n|---|---|\n")
	require.True(t, found)
	var listed []string
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		if len(cells) != 4 {
			break
		}
		for _, p := range regexp.MustCompile("`(/[^`]+)`").FindAllStringSubmatch(cells[2], -1) {
			for method := range strings.SplitSeq(strings.TrimSpace(cells[1]), ", ") {
				if method != http.MethodHead {
					listed = append(listed, method+" "+p[1])
				}
			}
		}
	}
	assert.ElementsMatch(t, passthrough.Served, listed)
}

// The orders that engines take: vLLM 0.32.0 and SGLang 0.5.23 by their routes, and some that no release has.
var administration = strings.Fields(`/abort_requests /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /sleep
	/wake_up /is_sleeping /is_paused /load /v1/loads /v1/load_lora_adapter /v1/unload_lora_adapter /start_profile
	/stop_profile /pause /resume /scale_elastic_ep /collective_rpc /server_info /update_weights
	/init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update /finish_weight_update
	/weight_info /release_kv_cache_memory /fault_tolerance/apply /flush_cache /freeze_gc /slow_down /pd_role_switch
	/set_internal_state /get_weights_by_name /weights_checker /configure_logging /dumper/start /begin_weight_update
	/end_weight_update /continue_generation /register_encoder_url /unregister_encoder_url /get_server_info
	/update_weights_from_disk /destroy_weights_update_group /resume_memory_occupation
	/v1/shutdown /v1/weights /v1/profile /v1/Load-Lora-Adapter /inference/v1/abort_requests`)

// What a host adds passes by what it says, but no order to an engine does, whether it is named or stands below a path.
func TestAHostAddsPathsButNoOrders(t *testing.T) {
	h := handler(t, unknown, &passthrough.Options{Paths: []string{"/classify", "/v1/files/*/content", "/v1/x/*", "/*"}})
	for target, want := range map[string]bool{"/classify": true, "/v1/files/f_1/content": true, "/v1/x/y/z": true,
		"/health": true, "/": false, "/v1/x/../y": false} {
		assert.Equal(t, want, served(t, h, http.MethodGet, target), target)
		assert.Equal(t, want, served(t, h, http.MethodDelete, target), target)
	}
	narrow := handler(t, unknown, &passthrough.Options{Paths: []string{"/classify", "/v1/files/*/content"}})
	for _, target := range []string{"/classify/x", "/v1/files", "/v1/files/f_1", "/v1/files/f_1/content/x", "/health"} {
		assert.False(t, served(t, narrow, http.MethodGet, target), target)
	}
	for _, order := range administration {
		assert.False(t, served(t, handler(t, unknown, nil), http.MethodPost, order), order)
		assert.False(t, served(t, h, http.MethodPost, order), order)
		_, err := passthrough.New(unknown, &passthrough.Options{Paths: []string{order}})
		require.ErrorContains(t, err, "order", order)
	}
	for _, wrong := range []string{"", "/", "x", "v1/files", "/v1/files/", "/v1//files", "/v1/../x", "/v1/f*", "/a b",
		"/v1/files?x=1", "/%73leep", "GET /v1/files"} {
		_, err := passthrough.New(unknown, &passthrough.Options{Paths: []string{wrong}})
		require.ErrorContains(t, err, "is not a path", wrong)
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
