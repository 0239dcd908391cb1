// SPDX-License-Identifier: Apache-2.0

package sglang_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
)

const wantsLogprobs = `{"text":"x","return_logprob":true,"logprob_start_len":0}`

func rewriter(t testing.TB, body, prefill string) func([]byte) ([]byte, error) {
	t.Helper()
	r, ok := connector.As[connector.Rewriter](open(t, ``))
	require.True(t, ok)
	return r.Rewrite(session(t, connector.APISGLang, body), func() *connector.PrefillResult {
		if prefill == "" {
			return nil
		}
		return play.Response(prefill)
	})
}

// A stream is parsed only if something in it must change.
func TestAnswersAreParsedOnlyForLogprobsOfThePrompt(t *testing.T) {
	for body, parsed := range map[string]bool{
		wantsLogprobs: true,
		`{"text":"x","return_logprob":true,"logprob_start_len":7}`:                    true,
		`{"text":["x","y"],"return_logprob":[false,true],"logprob_start_len":[-1,0]}`: true,
		`{"text":"x","return_logprob":true}`:                                          false,
		`{"text":"x","return_logprob":true,"logprob_start_len":-1}`:                   false,
		`{"text":["x","y"],"return_logprob":[true,true],"logprob_start_len":[-1,-1]}`: false,
		`{"text":["x","y"],"return_logprob":[false,false],"logprob_start_len":[0,0]}`: false,
		`{"text":"x","return_logprob":false,"logprob_start_len":0}`:                   false,
		`{"text":"x"}`: false,
	} {
		assert.Equal(t, parsed, rewriter(t, body, "{}") != nil, body)
	}
	r, _ := connector.As[connector.Rewriter](open(t, ``))
	chat := session(t, connector.APIChat, `{"messages":[],"logprobs":true,"return_logprob":true,"logprob_start_len":0}`)
	assert.Nil(t, r.Rewrite(chat, nil), "chat gives no log probabilities of the prompt")
}

func TestPrefillsLogprobsComeBeforeDecodes(t *testing.T) {
	const p = `{"text":"","meta_info":{"id":"a","input_token_logprobs":[[null,1,null],[-0.12345678901234567,` +
		`9007199254740993,null]],"input_top_logprobs":[null,[[-0.1,5,null]]]}}`
	for rule, k := range map[string][2]string{
		"none of D's": {`{"text":"b","meta_info":{"input_token_logprobs":[],"n":18446744073709551615}}`,
			`{"text":"b","meta_info":{"input_token_logprobs":[[null,1,null],[-0.12345678901234567,9007199254740993,` +
				`null]],"n":18446744073709551615}}`},
		"some of D's": {`{"meta_info":{"input_token_logprobs":[[-1,2,null]],"x":1}}`,
			`{"meta_info":{"input_token_logprobs":[[null,1,null],[-0.12345678901234567,9007199254740993,null],[-1,2,` +
				`null]],"x":1}}`},
		"null": {`{"meta_info":{"input_token_logprobs":null}}`,
			`{"meta_info":{"input_token_logprobs":[[null,1,null],[-0.12345678901234567,9007199254740993,null]]}}`},
		"all lists of the prompt": {`{"meta_info":{"input_top_logprobs":[],"input_token_logprobs":[]}}`,
			`{"meta_info":{"input_top_logprobs":[null,[[-0.1,5,null]]],"input_token_logprobs":[[null,1,null],` +
				`[-0.12345678901234567,9007199254740993,null]]}}`},
		"not there": {`{"meta_info":{"x":1}}`, `{"meta_info":{"x":1}}`},
		"no object": {`"text"`, `"text"`},
		"not JSON":  {`{"meta_info":`, `{"meta_info":`},
		"an error":  {`{"error":{"message":"m"}}`, `{"error":{"message":"m"}}`},
		"other index": {`{"index":1,"meta_info":{"input_token_logprobs":[]}}`,
			`{"index":1,"meta_info":{"input_token_logprobs":[]}}`},
	} {
		merge := rewriter(t, wantsLogprobs, p)
		for range 2 { // each event of a stream
			got, err := merge([]byte(k[0]))
			require.NoError(t, err, rule)
			assert.Equal(t, k[1], string(got), rule)
		}
	}
}

func TestEachSequenceGetsItsOwnLogprobs(t *testing.T) {
	const p = `[{"meta_info":{"input_token_logprobs":[[-1,1,null]]}},{"meta_info":{"input_token_logprobs":[[-2,2,` +
		`null]]}}]`
	merge := rewriter(t, `{"text":["x","y"],"return_logprob":true,"logprob_start_len":0}`, p)
	whole, err := merge(
		[]byte(`[{"meta_info":{"input_token_logprobs":[]}}, {"meta_info":{"input_token_logprobs":[]}}]`),
	)
	require.NoError(t, err)
	assert.Equal(t, `[{"meta_info":{"input_token_logprobs":[[-1,1,null]]}},{"meta_info":{"input_token_logprobs":[[-2,`+
		`2,null]]}}]`, string(whole))
	event, err := merge([]byte(`{"index":1,"meta_info":{"input_token_logprobs":[]}}`))
	require.NoError(t, err)
	assert.Equal(t, `{"index":1,"meta_info":{"input_token_logprobs":[[-2,2,null]]}}`, string(event))
}

func TestWithoutPrefillsAnswerDecodesStays(t *testing.T) {
	const d = `{"meta_info":{"input_token_logprobs":[]}}`
	for _, p := range []string{"", `{}`, `null`, `[]`, `{"meta_info":[]}`, `{"meta_info":{"input_token_logprobs":"x"}}`,
		`{"meta_info":{"input_token_logprobs":[ ]}}`, `not JSON`} {
		got, err := rewriter(t, wantsLogprobs, p)([]byte(d))
		require.NoError(t, err)
		assert.Equal(t, d, string(got), p)
	}
}

// A P that gave up transfers nothing, and D would wait for 300 s.
func TestPrefillThatGaveUpIsNoTransfer(t *testing.T) {
	check, ok := connector.As[connector.PrefillChecker](open(t, ``))
	require.True(t, ok)
	for _, k := range []struct {
		api  connector.API
		body string
		good bool
	}{
		{connector.APISGLang, `{"meta_info":{"finish_reason":{"type":"length","length":0}}}`, true},
		{connector.APISGLang, `{"meta_info":{"finish_reason":{"type":"abort","message":"m"}}}`, false},
		{connector.APISGLang, `[{"meta_info":{"finish_reason":{"type":"length"}}},` +
			`{"meta_info":{"finish_reason":{"type":"abort"}}}]`, false},
		{connector.APIChat, `{"choices":[{"finish_reason":"length"}]}`, true},
		{connector.APIChat, `{"choices":[{"finish_reason":"length"},{"finish_reason":"abort"}]}`, false},
		{connector.APICompletions, `{"object":"error","message":"m","code":500}`, false},
		{connector.APICompletions, `{"choices":[{"finish_reason":"stop"}]}`, true},
		{connector.APICompletions, `{"choices":[`, false},
		{connector.APIResponses, `{"object":"response","status":"incomplete","error":null}`, true},
		{connector.APIResponses, `{"object":"response","status":"failed","error":{"code":"server_error"}}`, false},
		{connector.APIMessages, `{"type":"message","stop_reason":"max_tokens"}`, true},
	} {
		err := check.CheckPrefill(session(t, k.api, `{"text":"x"}`), play.Response(k.body))
		if k.good {
			assert.NoError(t, err, k.body)
		} else {
			assert.ErrorIs(t, err, connector.ErrNoTransfer, k.body)
		}
	}
}

func FuzzMerge(f *testing.F) {
	f.Add(`{"meta_info":{"input_token_logprobs":[[-1,1,null]]}}`, `{"meta_info":{"input_token_logprobs":[]}}`)
	f.Add(`[{"meta_info":{"input_top_logprobs":[1]}}]`, `[{"meta_info":{"input_top_logprobs":null}}]`)
	f.Add(`{"meta_info":{"input_token_logprobs":[ ]}}`, `{"index":-1}`)
	f.Add(`{"meta_info":{"input_token_logprobs":[1]}}`, `{"meta_info":{"input_token_logprobs":{"a":1}}}`)
	c := open(f, ``)
	r, _ := connector.As[connector.Rewriter](c)
	check, _ := connector.As[connector.PrefillChecker](c)
	f.Fuzz(func(t *testing.T, p, d string) {
		s := session(t, connector.APISGLang, wantsLogprobs)
		_ = check.CheckPrefill(s, play.Response(p))
		got, err := r.Rewrite(s, func() *connector.PrefillResult { return play.Response(p) })([]byte(d))
		require.NoError(t, err)
		if json.Valid([]byte(d)) {
			require.True(t, json.Valid(got), "%s and %s gave %s", p, d, got)
		} else {
			require.Equal(t, d, string(got))
		}
	})
}
