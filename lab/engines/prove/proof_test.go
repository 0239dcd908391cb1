// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/lab/internal/apis"
)

// counters is an engine that has only a metrics page, whose counters the gateway can raise.
type counters struct {
	mu     sync.Mutex
	values map[string]float64
}

func (c *counters) add(series string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.values[series] += float64(n)
}

func (c *counters) page() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var b strings.Builder
	b.WriteString(`vllm:cache_config_info{hash_block_size="9",block_size="32",engine="0",` +
		`kv_cache_memory_bytes="65536",num_gpu_blocks="64"} 1.0` + "\n")
	for series, value := range c.values {
		fmt.Fprintf(&b, "# TYPE of the next line\n%s %g\n", series, value)
	}
	return b.String()
}

// rules say what a gateway and its engines do wrong.
type rules struct {
	text          func(prompt string) string // what the gateway makes of the right text
	tokens, bytes int                        // taken over in addition to what is right
	none          bool                       // nothing is taken over
	failed, late  int
	pinned        bool
}

func rightText(prompt string) string { return "text for " + prompt[:26] }

// observeFakes sends the proof's requests to a gateway and engines that follow the rules.
func observeFakes(t *testing.T, r rules) proof {
	t.Helper()
	d, p := &counters{values: map[string]float64{}}, &counters{values: map[string]float64{}}
	answer := func(w http.ResponseWriter, request *http.Request, text func(string) string) int {
		var body struct {
			Prompt, Input string
			Stream        bool
			Messages      []struct{ Content string }
			TokenIDs      []int `json:"token_ids"`
		}
		content, err := io.ReadAll(request.Body)
		assert.NoError(t, err)
		assert.NoError(t, json.Unmarshal(content, &body))
		prompt := body.Prompt + body.Input
		for _, message := range body.Messages {
			prompt += message.Content
		}
		for _, token := range body.TokenIDs {
			prompt += string(rune(token))
		}
		format := map[string]string{
			apis.Completions.Path: `{"choices":[{"text":%q}],"usage":{"prompt_tokens":%d}}`,
			apis.Chat.Path:        `{"choices":[{"message":{"content":%q}}],"usage":{"prompt_tokens":%d}}`,
			apis.Responses.Path:   `{"output":[{"content":[{"text":%q}]}],"usage":{"input_tokens":%d}}`,
			apis.Messages.Path:    `{"content":[{"text":%q}],"usage":{"input_tokens":%d}}`,
			apis.Generate.Path:    `{"choices":[{"text":%q,"token_ids":null}],"usage":{"prompt_tokens":%d}}`,
		}[request.URL.Path]
		if body.Stream {
			format = "data: " + format + "\n\ndata: [DONE]\n\n"
		}
		fmt.Fprintf(w, format, text(prompt), len(prompt))
		return len(prompt)
	}
	engine := func(c *counters) *httptest.Server {
		return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
			if request.URL.Path == "/metrics" {
				_, _ = io.WriteString(w, c.page())
				return
			}
			answer(w, request, rightText)
		}))
	}
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		text := rightText
		if r.text != nil {
			text = r.text
		}
		tokens := answer(w, request, text)
		if !r.none {
			d.add(`vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}`, tokens+r.tokens)
			d.add(`vllm:nixl_bytes_transferred_sum{engine="0"}`, (tokens+31)/32*1024+r.bytes)
		}
		d.add(`vllm:prompt_tokens_by_source_total{source="local_compute"}`, 7)
		d.add(`vllm:nixl_num_failed_transfers_total{engine="0"}`, r.failed)
		p.add(`vllm:nixl_num_kv_expired_reqs_total{engine="0"}`, r.late)
		if r.pinned {
			p.add(`vllm:kv_cache_usage_perc{engine="0"}`, 1)
		}
	}))
	prefill, decode := engine(p), engine(d)
	for _, server := range []*httptest.Server{gateway, prefill, decode} {
		t.Cleanup(server.Close)
	}
	result, err := observe(t.Context(), gateway.URL, prefill.URL, decode.URL, 0)
	require.NoError(t, err)
	return result
}

func TestProofHoldsWhenExactlyThePromptIsTakenOver(t *testing.T) {
	assert.Empty(t, observeFakes(t, rules{}).problems())
}

func TestProofFails(t *testing.T) {
	for name, test := range map[string]struct {
		rules rules
		says  string
	}{
		"when the decode engine computes the prompt": {rules{none: true},
			"took over 0 of 300 prompt tokens, 0 of 10240 bytes"},
		"when a token is missing":       {rules{tokens: -1}, "299 of 300"},
		"when a byte too much is moved": {rules{bytes: 1}, "10241 of 10240"},
		"when a text is wrong":          {rules{text: strings.ToUpper}, "not that of one engine alone"},
		"when the text ignores the prompt": {rules{text: func(string) string { return "same" }},
			"proves nothing"},
		"when a transfer failed":  {rules{failed: 1}, "7 failed transfers"},
		"when a handoff expired":  {rules{late: 1}, "7 handoffs as expired"},
		"when blocks stay pinned": {rules{pinned: true}, "still holds blocks"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			problems := strings.Join(observeFakes(t, test.rules).problems(), "\n")
			assert.Contains(t, problems, test.says)
		})
	}
}

func TestSumAddsUpOnlyTheNamedSeries(t *testing.T) {
	page := parseMetrics("# HELP a\na{x=\"1\"} 2\na{x=\"2\"} 3.0\na_total 5\nab{x=\"1\"} 7\na 1e1\n\n")
	assert.InDelta(t, 15, page.sum(sample{"a", ""}), 0)
	assert.InDelta(t, 2, page.sum(sample{"a", `x="1"`}), 0)
	assert.Zero(t, page.sum(sample{"absent", ""}))
}
