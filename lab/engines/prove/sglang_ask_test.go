// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

// The forms are those that SGLang 0.5.23 sent, shortened.
func TestSGLangsResponsesAreRead(t *testing.T) {
	for form, k := range map[string]struct {
		path, body string
		stream     bool
		texts      map[int]string
		tokens     int
		numbers    map[int][]float64
	}{
		"completions, two prompts": {path: "/v1/completions",
			body: `{"choices":[{"index":0,"text":"ab","logprobs":{"token_logprobs":[-0.5]}},{"index":1,"text":"c"}],` +
				`"usage":{"prompt_tokens":7}}`,
			texts: map[int]string{0: "ab", 1: "c"}, tokens: 7, numbers: map[int][]float64{0: {-0.5}, 1: nil}},
		"chat, streamed": {path: "/v1/chat/completions", stream: true,
			body: "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n" +
				"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n" +
				"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3}}\n\ndata: [DONE]\n\n",
			texts: map[int]string{0: "a"}, tokens: 3},
		"generate": {path: "/generate", body: `{"text":"ab","meta_info":{"prompt_tokens":2,"input_token_logprobs":` +
			`[[null,57,null],[-5.5,49,null]],"output_token_logprobs":[[-0.9,37,null]]}}`,
			texts: map[int]string{0: "ab"}, tokens: 2, numbers: map[int][]float64{0: {57, -5.5, 49, -0.9, 37}}},
		"generate, two prompts": {path: "/generate",
			body:  `[{"text":"ab","meta_info":{"prompt_tokens":2}},{"text":"c","meta_info":{"prompt_tokens":5}}]`,
			texts: map[int]string{0: "ab", 1: "c"}, tokens: 7},
		"generate, two prompts, streamed": {path: "/generate", stream: true,
			body: "data: {\"text\":\"c\",\"meta_info\":{\"prompt_tokens\":5},\"index\":1}\n\n" +
				"data: {\"text\":\"a\",\"meta_info\":{\"prompt_tokens\":2},\"index\":0}\n\n" +
				"data: {\"text\":\"ab\",\"meta_info\":{\"prompt_tokens\":2},\"index\":0}\n\ndata: [DONE]\n\n",
			texts: map[int]string{0: "ab", 1: "c"}, tokens: 7},
		"responses": {path: "/v1/responses",
			body: `{"output":[{"content":[{"text":"ab"}]}],"text":{"format":{"type":"text"}},` +
				`"usage":{"input_tokens":9}}`,
			texts: map[int]string{0: "ab"}, tokens: 9},
		"responses, streamed": {path: "/v1/responses", stream: true,
			body: "event: response.created\n" +
				"data: {\"type\":\"response.created\",\"response\":{\"output\":[],\"usage\":null}}\n\n" +
				"data: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n" +
				"data: {\"type\":\"response.output_text.done\",\"text\":\"a\"}\n\n" +
				"data: {\"type\":\"response.incomplete\",\"response\":{\"usage\":{\"input_tokens\":9}}}\n\n",
			texts: map[int]string{0: "a"}, tokens: 9},
		"messages": {path: "/v1/messages", body: `{"content":[{"type":"text","text":"ab"}],"usage":{"input_tokens":4}}`,
			texts: map[int]string{0: "ab"}, tokens: 4},
		"messages, streamed": {path: "/v1/messages", stream: true,
			body: "data: {\"type\":\"message_start\",\"message\":{\"content\":[],\"usage\":{\"input_tokens\":4}}}\n\n" +
				"data: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"text\":\"a\"}}\n\n" +
				"data: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"max_tokens\"}," +
				"\"usage\":{\"output_tokens\":1}}\n\n" +
				"data: {\"type\":\"message_stop\"}\n\n",
			texts: map[int]string{0: "a"}, tokens: 4},
	} {
		t.Run(form, func(t *testing.T) {
			serve := func(body string) string {
				s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					_, _ = w.Write([]byte(body))
				}))
				t.Cleanup(s.Close)
				return s.URL
			}
			q := sglangRequest{path: k.path, body: map[string]any{}, stream: k.stream}
			a := askSGLang(t.Context(), serve(k.body), q, nil)
			require.NoError(t, a.err)
			require.True(t, a.whole)
			require.Equal(t, k.texts, a.texts)
			require.Equal(t, k.tokens, a.promptTokens)
			if k.numbers != nil {
				require.Equal(t, k.numbers, a.logprobs)
			}
			require.Empty(t, a.differs(a))
			cut := askSGLang(t.Context(), serve(k.body[:len(k.body)*9/10]), q, nil)
			require.NotEmpty(t, cut.differs(a), "it was cut")
		})
	}
}

func TestASGLangRowProvesNothingUnlessDecodeTookOverThePrompt(t *testing.T) {
	good := sglangRow{reply: &sglangReply{mode: "disaggregated", promptTokens: 10}, taken: 10,
		moved: 10 * sglangTokenBytes}
	require.Empty(t, good.problem())
	for what, spoil := range map[string]func(*sglangRow){
		"another text":   func(r *sglangRow) { r.wrong = "another text" },
		"one engine":     func(r *sglangRow) { r.reply = &sglangReply{mode: "aggregated", promptTokens: 10} },
		"computed again": func(r *sglangRow) { r.taken = 0 },
		"not moved":      func(r *sglangRow) { r.moved = 0 },
		"no prompt":      func(r *sglangRow) { r.reply = &sglangReply{mode: "disaggregated"} },
	} {
		row := good
		spoil(&row)
		require.NotEmpty(t, row.problem(), what)
	}
}
