// SPDX-License-Identifier: Apache-2.0

package apis

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The forms are those that SGLang 0.5.23 and, where it has an API of its own, vLLM 0.32.0 sent, shortened.
func TestResponsesOfEachAPIAreRead(t *testing.T) {
	for form, k := range map[string]struct {
		body    string
		stream  bool
		texts   map[int]string
		tokens  int
		numbers map[int][]float64
	}{
		"completions, two prompts": {body: `{"choices":[{"index":0,"text":"ab","logprobs":{"token_logprobs":[-0.5]}},` +
			`{"index":1,"text":"c"}],"usage":{"prompt_tokens":7}}`,
			texts: map[int]string{0: "ab", 1: "c"}, tokens: 7, numbers: map[int][]float64{0: {-0.5}, 1: nil}},
		"chat, streamed": {stream: true,
			body: "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n" +
				"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n" +
				"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3}}\n\ndata: [DONE]\n\n",
			texts: map[int]string{0: "a"}, tokens: 3},
		"generate": {body: `{"text":"ab","meta_info":{"prompt_tokens":2,"input_token_logprobs":` +
			`[[null,57,null],[-5.5,49,null]],"output_token_logprobs":[[-0.9,37,null]]}}`,
			texts: map[int]string{0: "ab"}, tokens: 2, numbers: map[int][]float64{0: {57, -5.5, 49, -0.9, 37}}},
		"generate, two prompts": {
			body:  `[{"text":"ab","meta_info":{"prompt_tokens":2}},{"text":"c","meta_info":{"prompt_tokens":5}}]`,
			texts: map[int]string{0: "ab", 1: "c"}, tokens: 7},
		"generate, two prompts, streamed": {stream: true,
			body: "data: {\"text\":\"c\",\"meta_info\":{\"prompt_tokens\":5},\"index\":1}\n\n" +
				"data: {\"text\":\"a\",\"meta_info\":{\"prompt_tokens\":2},\"index\":0}\n\n" +
				"data: {\"text\":\"ab\",\"meta_info\":{\"prompt_tokens\":2},\"index\":0}\n\ndata: [DONE]\n\n",
			texts: map[int]string{0: "ab", 1: "c"}, tokens: 7},
		"responses": {body: `{"output":[{"content":[{"text":"ab"}]}],"text":{"format":{"type":"text"}},` +
			`"usage":{"input_tokens":9}}`,
			texts: map[int]string{0: "ab"}, tokens: 9},
		"responses, streamed": {stream: true,
			body: "event: response.created\n" +
				"data: {\"type\":\"response.created\",\"response\":{\"output\":[],\"usage\":null}}\n\n" +
				"data: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n" +
				"data: {\"type\":\"response.reasoning_text.delta\",\"delta\":\"b\"}\n\n" +
				"data: {\"type\":\"response.output_text.done\",\"text\":\"a\"}\n\n" +
				"data: {\"type\":\"response.incomplete\",\"response\":{\"usage\":{\"input_tokens\":9}}}\n\n",
			texts: map[int]string{0: "a"}, tokens: 9},
		"messages": {body: `{"content":[{"type":"text","text":"ab"}],"usage":{"input_tokens":4}}`,
			texts: map[int]string{0: "ab"}, tokens: 4},
		"messages, streamed": {stream: true,
			body: "data: {\"type\":\"message_start\",\"message\":{\"content\":[],\"usage\":{\"input_tokens\":4}}}\n\n" +
				"data: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"text\":\"a\"}}\n\n" +
				"data: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"max_tokens\"}," +
				"\"usage\":{\"output_tokens\":1}}\n\n" +
				"data: {\"type\":\"message_stop\"}\n\n",
			texts: map[int]string{0: "a"}, tokens: 4},
		"vLLM's generate": {body: `{"choices":[{"token_ids":[91,74,58]}],"usage":{"prompt_tokens":1}}`,
			texts: map[int]string{0: "[J:"}, tokens: 1},
		"vLLM's messages, with a cached prompt": {body: `{"content":[{"text":"ab"}],"usage":{"input_tokens":4,` +
			`"cache_creation_input_tokens":2,"cache_read_input_tokens":1}}`, texts: map[int]string{0: "ab"}, tokens: 7},
	} {
		t.Run(form, func(t *testing.T) {
			s := Read(strings.NewReader(k.body), k.stream, nil)
			require.NoError(t, s.Err)
			require.True(t, s.Whole)
			require.Equal(t, k.texts, s.Texts)
			require.Equal(t, k.tokens, s.PromptTokens)
			if k.numbers != nil {
				require.Equal(t, k.numbers, s.Logprobs)
			}
			cut := Read(strings.NewReader(k.body[:len(k.body)*9/10]), k.stream, nil)
			require.False(t, cut.Whole && cut.Err == nil, "it was cut")
		})
	}
}

func TestTokensAreTheBytesOfAPrompt(t *testing.T) {
	require.Equal(t, []int{91, 74, 58}, Generate.Body("[J:", 1)["token_ids"])
}
