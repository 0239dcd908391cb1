// SPDX-License-Identifier: Apache-2.0

package trtllm_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
)

func final(t *testing.T, config string, s *connector.Session, response string) (connector.Response, bool) {
	t.Helper()
	f, ok := connector.As[connector.Finisher](open(t, config))
	require.True(t, ok)
	return f.Final(s, play.Response(response))
}

func texts(events [][]byte) []string {
	var out []string
	for _, e := range events {
		out = append(out, string(e))
	}
	return out
}

const finished = `{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","prompt_token_ids":[1],` +
	`"usage":{"total_tokens":3},"choices":[{"index":0,"text":"Yes","logprobs":null,"finish_reason":"stop",` +
	`"stop_reason":".","disaggregated_params":{"ctx_request_id":1}}]}`

func TestAnAnswerThatEndedIsTheClients(t *testing.T) {
	got, ok := final(t, ``, session(t, connector.APICompletions, `{"prompt":"x"}`), finished)
	require.True(t, ok)
	assert.Equal(t, strings.Replace(finished, `,"disaggregated_params":{"ctx_request_id":1}`, "", 1), string(got.Body))
	assert.Empty(t, got.Events)

	top := `{"disaggregated_params":{},` + finished[1:]
	got, ok = final(t, ``, session(t, connector.APICompletions, `{"prompt":"x"}`), top)
	require.True(t, ok)
	assert.NotContains(t, string(got.Body), "disaggregated_params")
}

func TestOtherAnswersAreNotTheClients(t *testing.T) {
	for _, reason := range []string{`"length"`, `"not_finished"`, `"cancelled"`, `"timeout"`, `"abort"`, `null`, `7`} {
		_, ok := final(t, ``, session(t, connector.APICompletions, `{"prompt":"x"}`),
			strings.Replace(finished, `"stop"`, reason, 1))
		assert.False(t, ok, reason)
	}
	for _, bad := range []string{`x`, `{}`, `{"choices":[]}`,
		`{"choices":[{"finish_reason":"stop"},{"finish_reason":"stop"}]}`,
		`{"choices":[{"finish_reason":"stop","a":{"b":1,"b":2},"disaggregated_params":1,"disaggregated_params":2}]}`} {
		_, ok := final(t, ``, session(t, connector.APICompletions, `{"prompt":"x"}`), bad)
		assert.False(t, ok, bad)
	}
	_, ok := final(t, `{"dispatch":"generation-first"}`, session(t, connector.APICompletions, `{"prompt":"x"}`),
		finished)
	assert.False(t, ok, "D answers where both were asked")
}

// A client that wants a stream gets P's response as one chunk of its API.
func TestAStreamOfAFinishedAnswer(t *testing.T) {
	got, ok := final(t, ``, session(t, connector.APICompletions, `{"prompt":"x","stream":true}`), finished)
	require.True(t, ok)
	assert.Equal(t, []string{
		`{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":"Yes",` +
			`"logprobs":null,"finish_reason":"stop","stop_reason":"."}]}`,
		`[DONE]`}, texts(got.Events))

	got, ok = final(
		t, ``, session(t, connector.APICompletions,
			`{"prompt":"x","stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}`),
		finished,
	)
	require.True(t, ok)
	assert.Equal(t, []string{
		`{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,"text":"Yes",` +
			`"logprobs":null,"finish_reason":"stop","stop_reason":"."}],"usage":{"total_tokens":3}}`,
		`{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[],"usage":{"total_tokens":3}}`,
		`[DONE]`}, texts(got.Events))

	const chat = `{"id":"chatcmpl-1","object":"chat.completion","created":7,"model":"m","choices":[{"index":0,` +
		`"message":{"role":"assistant","content":"Yes","tool_calls":[{"id":"a","function":{"name":"f"}},{"id":"b"}]},` +
		`"finish_reason":"tool_calls"}]}`
	got, ok = final(
		t, ``, session(t, connector.APIChat, `{"messages":[],"stream":true,"stream_options":{"include_usage":true}}`),
		chat,
	)
	require.True(t, ok)
	assert.Equal(t, []string{
		`{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,` +
			`"finish_reason":"tool_calls","delta":{"role":"assistant","content":"Yes","tool_calls":[{"id":"a",` +
			`"function":{"name":"f"},"index":0},{"id":"b","index":1}]}}]}`,
		`[DONE]`}, texts(got.Events), "no usage is made up")
}

// Clients read the delta of each choice.
func TestAChunkHasADeltaIfTheMessageIsNull(t *testing.T) {
	f, ok := connector.As[connector.Finisher](open(t, ``))
	require.True(t, ok)
	a, ok := f.Final(session(t, connector.APIChat, `{"messages":[],"stream":true}`),
		play.Response(`{"choices":[{"index":0,"message":null,"finish_reason":"stop"}]}`))
	require.True(t, ok)
	assert.Equal(t, `{}`, gjson.GetBytes(a.Events[0], "choices.0.delta").Raw)
}

func TestPrefillThatGaveUpIsNoTransfer(t *testing.T) {
	check, ok := connector.As[connector.PrefillChecker](open(t, `{"dispatch":"generation-first"}`))
	require.True(t, ok)
	s := session(t, connector.APICompletions, `{"prompt":"x"}`)
	require.NoError(t, check.CheckPrefill(s, play.Response(finished)))
	require.NoError(t, check.CheckPrefill(s, play.Response(response)))
	for _, reason := range []string{"cancelled", "timeout"} {
		ended := strings.Replace(response, `"length"`, `"`+reason+`"`, 1)
		require.ErrorIs(t, check.CheckPrefill(s, play.Response(ended)), connector.ErrNoTransfer)
	}
	require.ErrorIs(t, check.CheckPrefill(s, play.Response(`{"choices":[]}`)), connector.ErrNoTransfer)
}

func FuzzResponses(f *testing.F) {
	for _, a := range []string{response, finished,
		`{"choices":[{"message":{"tool_calls":[1]},"finish_reason":"stop"}]}`,
		`{"choices":[{"finish_reason":"stop","message":7}]}`, `{}`} {
		f.Add(a, true)
		f.Add(a, false)
	}
	c := open(f, `{"authKey":"k"}`)
	finisher, _ := connector.As[connector.Finisher](c)
	f.Fuzz(func(t *testing.T, response string, chat bool) {
		s := session(t, connector.APICompletions, `{"prompt":"x","stream":true,`+
			`"stream_options":{"include_usage":true}}`)
		if chat {
			s = session(t, connector.APIChat, `{"messages":[],"stream":true}`)
		}
		if a, ok := finisher.Final(s, play.Response(response)); ok {
			requireJSON(t, a.Body)
			for _, e := range a.Events[:len(a.Events)-1] {
				requireJSON(t, e)
			}
		}
		leg, err := after(c, s, response)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrNoTransfer)
			return
		}
		requireJSON(t, []byte(leg.Body))
	})
}
