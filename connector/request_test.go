// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/internal/contract"
)

func TestParseRequestReadsModelAndStream(t *testing.T) {
	for _, c := range []struct {
		body, model string
		stream      bool
	}{
		{`{}`, "", false},
		{`{"model":"m\u00e4/x","stream":true}`, "mä/x", true},
		{`{"model":null,"stream":null}`, "", false},
		{`{"model":"","stream":false}`, "", false},
		{`{"m\u006fdel":"m","str\u0065am":true}`, "m", true},
		{`{"Model":"m","Stream":true}`, "", false},
	} {
		r := parse(t, connector.APIChat, c.body)
		assert.Equal(t, c.model, r.Model, c.body)
		assert.Equal(t, c.stream, r.Stream, c.body)
	}
}

func TestFieldTakesNullForAbsent(t *testing.T) {
	r := parse(t, connector.APIChat, `{"a":null,"b": [1, 2] ,"c":false}`)
	_, ok := r.Field("a")
	assert.False(t, ok)
	_, ok = r.Field("nowhere")
	assert.False(t, ok)
	raw, ok := r.Field("b")
	assert.True(t, ok)
	assert.Equal(t, "[1, 2]", string(raw), "without the white space around it")
	_, ok = r.Field("c")
	assert.True(t, ok)
}

// A request is refused before anything is sent. The error names the member and holds no value of the body.
func TestParseRequestRefuses(t *testing.T) {
	for _, c := range []struct{ rule, body, param string }{
		{"an empty body", ``, ""},
		{"an array", `[{"model":"secret"}]`, ""},
		{"a string", `"secret"`, ""},
		{"null", `null`, ""},
		{"a cut body", `{"prompt":"secret`, ""},
		{"trailing bytes", `{"prompt":"secret"} x`, ""},
		{"two objects", `{"prompt":"secret"}{}`, ""},
		{"a byte order mark", "\ufeff{}", ""},
		{"a member twice", `{"prompt":"secret","prompt":"secret2"}`, "prompt"},
		{"a member twice under two spellings", `{"prompt":"secret","pr\u006fmpt":"secret2"}`, "prompt"},
		{"transfer members twice", `{"kv_transfer_params":{},"kv_transfer\u005fparams":{}}`, "kv_transfer_params"},
		{"model not a string", `{"model":["secret"]}`, "model"},
		{"model not UTF-8", "{\"model\":\"secret\xff\"}", "model"},
		{"model with half a surrogate pair", `{"model":"secret\ud800"}`, "model"},
		{"stream not a boolean", `{"stream":"secret"}`, "stream"},
		{"stream as a number", `{"stream":1}`, "stream"},
		{"stream_options not an object", `{"stream_options":["secret"]}`, "stream_options"},
		{"max_tokens as a string", `{"max_tokens":"secret"}`, "max_tokens"},
		{"max_tokens as a fraction", `{"max_tokens":1.5}`, "max_tokens"},
		{"max_tokens as a boolean", `{"max_tokens":true}`, "max_tokens"},
		{"max_tokens out of all range", `{"max_tokens":1e999}`, "max_tokens"},
		{"max_tokens of 2^63", `{"max_tokens":9223372036854775808}`, "max_tokens"},
		{"max_tokens of 2^70", `{"max_tokens":1180591620717411303424}`, "max_tokens"},
		{"max_tokens of 2^63 as a float", `{"max_tokens":9.223372036854775808e18}`, "max_tokens"},
		{"max_completion_tokens", `{"max_completion_tokens":{}}`, "max_completion_tokens"},
		{"max_output_tokens", `{"max_output_tokens":[1]}`, "max_output_tokens"},
		{"min_tokens", `{"min_tokens":"1"}`, "min_tokens"},
		{"n", `{"n":"2"}`, "n"},
		{"best_of", `{"best_of":false}`, "best_of"},
		{"a transfer member twice in vllm_xargs", `{"vllm_xargs":{"kv_transfer_params":"secret",` +
			`"kv_transfer_params":2}}`, "vllm_xargs.kv_transfer_params"},
		{"any member twice in vllm_xargs", `{"vllm_xargs":{"a":"secret","\u0061":2}}`, "vllm_xargs.a"},
		{"a member twice in sampling_params", `{"sampling_params":{"a":1,"a":2}}`, "sampling_params.a"},
		{"a member twice in extra_args", `{"sampling_params":{"extra_args":{"kv_transfer_params":1,` +
			`"kv_transfer_params":2}}}`, "sampling_params.extra_args.kv_transfer_params"},
		{"a malformed holder", `{"vllm_xargs":{"a" "secret"}}`, "vllm_xargs"},
		{"malformed extra_args", `{"sampling_params":{"extra_args":{"a" "secret"}}}`, "sampling_params.extra_args"},
	} {
		t.Run(c.rule, func(t *testing.T) {
			r, err := connector.ParseRequest(connector.APIChat, []byte(c.body))
			require.Error(t, err)
			assert.Nil(t, r)
			var re *connector.RequestError
			require.ErrorAs(t, err, &re)
			assert.Equal(t, c.param, re.Param)
			assert.NotContains(t, err.Error(), "secret", "errors hold names, never values")
			assert.NotEmpty(t, re.Message)
			if re.Param != "" {
				assert.True(t, strings.HasPrefix(err.Error(), re.Param+": "), err.Error())
			}
		})
	}
}

func TestParseRequestRefusesOfTheAPIsThatKeepLimitsInside(t *testing.T) {
	for _, c := range []struct {
		api         connector.API
		body, param string
	}{
		{connector.APIGenerate, `{"sampling_params":["secret"]}`, "sampling_params"},
		{connector.APIGenerate, `{"sampling_params":{"max_tokens":"secret"}}`, "sampling_params.max_tokens"},
		{connector.APIGenerate, `{"sampling_params":{"min_tokens":1.5}}`, "sampling_params.min_tokens"},
		{connector.APIGenerate, `{"sampling_params":{"n":"2"}}`, "sampling_params.n"},
		{connector.APIGenerate, `{"sampling_params":{"best_of":[]}}`, "sampling_params.best_of"},
		{connector.APIGenerate, `{"sampling_params":{"max_tokens":1,"max_tokens":2}}`, "sampling_params.max_tokens"},
		{connector.APISGLang, `{"sampling_params":{"max_new_tokens":"secret"}}`, "sampling_params.max_new_tokens"},
		{connector.APISGLang, `{"sampling_params":{"min_new_tokens":true}}`, "sampling_params.min_new_tokens"},
	} {
		_, err := connector.ParseRequest(c.api, []byte(c.body))
		var re *connector.RequestError
		require.ErrorAs(t, err, &re, c.body)
		assert.Equal(t, c.param, re.Param)
		assert.NotContains(t, err.Error(), "secret")
	}
}

func TestIntegersAreWhatTheEnginesTakeForIntegers(t *testing.T) {
	for _, body := range []string{`{"max_tokens":16}`, `{"max_tokens":16.0}`, `{"max_tokens":1.6e1}`,
		`{"max_tokens":-1}`, `{"max_tokens":0}`, `{"max_tokens":9223372036854775807}`,
		`{"max_tokens":null,"n":null,"stream_options":null}`} {
		_, err := connector.ParseRequest(connector.APIChat, []byte(body))
		assert.NoError(t, err, body)
	}
}

func TestRequestErrorKeepsItsCause(t *testing.T) {
	cause := errors.New("x")
	err := &connector.RequestError{Message: "m", Err: cause}
	assert.EqualError(t, err, "m")
	assert.ErrorIs(t, err, cause)
}

// uncarried asks the declaration of a protocol that carries all APIs.
func uncarried(r *connector.ClientRequest, multiUse bool) string {
	t := connector.Traits{APIs: connector.APIs(), Handoff: connector.Handoff{MultiUse: multiUse}}
	if u, ok := errors.AsType[*connector.UnsupportedError]((&check.Rules{Traits: t}).Declared(r)); ok {
		return u.Member
	}
	return ""
}

// The table has requests that two engines cannot serve together, and similar ones that they can.
func TestUnsupported(t *testing.T) {
	const (
		chat, cmpl, resp = connector.APIChat, connector.APICompletions, connector.APIResponses
		msg, gen, sgl    = connector.APIMessages, connector.APIGenerate, connector.APISGLang
	)
	for _, c := range []struct {
		rule   string
		api    connector.API
		body   string
		member string
	}{
		{"one prompt", cmpl, `{"prompt":"a"}`, ""},
		{"a list of one prompt", cmpl, `{"prompt":[ "a,b]\"" ]}`, ""},
		{"a quote inside the one prompt does not end it", cmpl, `{"prompt":["a\",\"b"]}`, ""},
		{"brackets in strings do not end the one prompt", cmpl, `{"prompt":[["],",2]]}`, ""},
		{"a list of two prompts", cmpl, `{"prompt":["a" , "b"]}`, "prompt"},
		{"a list of two empty prompts", cmpl, `{"prompt":["",""]}`, "prompt"},
		{"token ids are one prompt", cmpl, `{"prompt":[1,2,3]}`, ""},
		{"a list of one prompt of token ids", cmpl, `{"prompt":[[1,2,3]]}`, ""},
		{"a list of two prompts of token ids", cmpl, `{"prompt":[ [1,[2]], [3]]}`, "prompt"},
		{"an empty list is the engine's to refuse", cmpl, `{"prompt":[ ]}`, ""},
		{"embeddings alone are one prompt", cmpl, `{"prompt_embeds":"AAA"}`, ""},
		{"a list of one embedding", cmpl, `{"prompt_embeds":["AAA"]}`, ""},
		{"two embeddings", cmpl, `{"prompt_embeds":["AAA","BBB"]}`, "prompt_embeds"},
		{"a prompt and an embedding are two prompts", cmpl, `{"prompt":"a","prompt_embeds":"AAA"}`, "prompt_embeds"},
		{"a prompt and no embedding", cmpl, `{"prompt":"a","prompt_embeds":null}`, ""},
		{"a prompt and a list of none", cmpl, `{"prompt":"a","prompt_embeds":[ ]}`, ""},
		{"SGLang's text", sgl, `{"text":["a","b"]}`, "text"},
		{"SGLang's token ids", sgl, `{"input_ids":[[1],[2]]}`, "input_ids"},
		{"SGLang's one prompt", sgl, `{"text":["a"],"input_ids":[1,2]}`, ""},
		{"many messages are one prompt", chat, `{"messages":[{"content":"a"},{"content":"b"}]}`, ""},

		{"prompt_logprobs", chat, `{"prompt_logprobs":1}`, "prompt_logprobs"},
		{"prompt_logprobs of 0 still asks for them", cmpl, `{"prompt_logprobs":0}`, "prompt_logprobs"},
		{"prompt_logprobs of null does not", cmpl, `{"prompt_logprobs":null}`, ""},
		{"prompt_logprobs inside sampling_params", gen, `{"sampling_params":{"prompt_logprobs":0}}`, "prompt_logprobs"},
		{"prompt_logprobs outside means nothing there", gen, `{"prompt_logprobs":0,"sampling_params":{}}`, ""},
		{"prompt_logprob_token_ids", gen, `{"sampling_params":{"prompt_logprob_token_ids":[[1]]}}`,
			"prompt_logprob_token_ids"},
		{"skip_reading_prefix_cache", gen, `{"sampling_params":{"skip_reading_prefix_cache":true}}`,
			"skip_reading_prefix_cache"},
		{"skip_reading_prefix_cache of false", gen, `{"sampling_params":{"skip_reading_prefix_cache":false}}`, ""},
		{"skip_reading_prefix_cache elsewhere means nothing", chat, `{"skip_reading_prefix_cache":true}`, ""},
		{"echo with logprobs", cmpl, `{"echo":true,"logprobs":1}`, "echo"},
		{"echo with logprobs of 0", cmpl, `{"echo":true,"logprobs":0}`, "echo"},
		{"echo alone", cmpl, `{"echo":true}`, ""},
		{"echo of false with logprobs", cmpl, `{"echo":false,"logprobs":1}`, ""},
		{"logprobs alone", cmpl, `{"logprobs":1}`, ""},
		{"echo in a chat, where vLLM takes top_logprobs, 0 or not, for prompt_logprobs", chat, `{"echo":true}`, "echo"},
		{"echo of false in a chat", chat, `{"echo":false,"logprobs":true,"top_logprobs":2}`, ""},

		{"truncation to what the limit leaves", chat, `{"truncate_prompt_tokens":-1}`, "truncate_prompt_tokens"},
		{"truncation to what the limit leaves", cmpl, `{"truncate_prompt_tokens":-1}`, "truncate_prompt_tokens"},
		{"truncation to a number is the same on both legs", chat, `{"truncate_prompt_tokens":100}`, ""},
		{"truncation auto", resp, `{"truncation":"auto"}`, "truncation"},
		{"truncation null, which vLLM takes for auto", resp, `{"truncation":null}`, "truncation"},
		{"truncation disabled", resp, `{"truncation":"disabled"}`, ""},
		{"truncation elsewhere means nothing", chat, `{"truncation":"auto"}`, ""},

		{"beam search", chat, `{"use_beam_search":true}`, "use_beam_search"},
		{"no beam search", cmpl, `{"use_beam_search":false}`, ""},
		{"a response in the background", resp, `{"background":true}`, "background"},
		{"not in the background", resp, `{"background":false}`, ""},
		{"the follow-up of a stored response", resp, `{"previous_response_id":"resp_1"}`, "previous_response_id"},
		{"a turn of a stored conversation", resp, `{"conversation":{"id":"conv_1"}}`, "conversation"},
		{"a turn of none", resp, `{"conversation":null}`, ""},
		{"the follow-up of none", resp, `{"previous_response_id":null}`, ""},
		{"background elsewhere means nothing", msg, `{"background":true,"previous_response_id":"x"}`, ""},
		{"n of 1", chat, `{"n":1}`, ""},
		{"an ordinary request", msg, `{"max_tokens":5,"messages":[],"system":"s"}`, ""},
	} {
		t.Run(c.rule, func(t *testing.T) {
			r := parse(t, c.api, c.body)
			assert.Equal(t, c.member, uncarried(r, false), "%v %s", c.api, c.body)
			assert.Equal(t, c.member, uncarried(r, true), "whether the handoff is single use does not matter")
		})
	}
}

func TestSeveralResponsesCannotShareASingleUseHandoff(t *testing.T) {
	for _, c := range []struct {
		api          connector.API
		body, member string
	}{
		{connector.APIChat, `{"n":2}`, "n"},
		{connector.APICompletions, `{"n":2.0}`, "n"},
		{connector.APICompletions, `{"n":1,"best_of":3}`, "best_of"},
		{connector.APIGenerate, `{"sampling_params":{"n":2}}`, "n"},
		{connector.APIGenerate, `{"sampling_params":{"best_of":2}}`, "best_of"},
		{connector.APIGenerate, `{"n":2}`, ""},
		{connector.APISGLang, `{"sampling_params":{"n":4}}`, "n"},
		{connector.APIChat, `{"n":null}`, ""},
		{connector.APIChat, `{"n":0}`, ""},
	} {
		r := parse(t, c.api, c.body)
		assert.Equal(t, c.member, uncarried(r, false), c.body)
		assert.Empty(t, uncarried(r, true), "a store can be read twice: %s", c.body)
	}
}

// An engine that serves alone gets the leg as it starts: if a client with rid "" left, SGLang would abort all requests.
// Nesting that no engine reads is not followed, since each level would cost a pass over the rest of the body.
func TestClientsChooseNoIDAtTheEngines(t *testing.T) {
	for _, api := range connector.APIs() {
		for _, id := range []string{`""`, `"a"`, `["a",""]`, `null`} {
			r, err := connector.ParseRequest(api, []byte(`{"rid":`+id+`,"x":1,"request_id":`+id+`,"r\u0069d2":2}`))
			require.NoError(t, err)
			body, err := contract.Body(contract.NewLeg(r))
			require.NoError(t, err)
			assert.Equal(t, `{"x":1,"r\u0069d2":2}`, string(body), api)
		}
		_, err := connector.ParseRequest(api, []byte(`{"rid":"a","r\u0069d":""}`))
		require.Error(t, err, "written otherwise it is the same member")
	}
}

func TestNestedHoldersCostOnePass(t *testing.T) {
	const depth = 9_000
	body := `{"sampling_params":` + strings.Repeat(`{"extra_args":`, depth) + `{"pad":"` + strings.Repeat("x", 4<<20) +
		`"}` + strings.Repeat("}", depth+1)
	start := time.Now()
	r := parse(t, connector.APIChat, body)
	assert.Less(t, time.Since(start), 30*time.Second)
	assert.Equal(t, body, bareLeg(t, r))
}

func TestStopsAt(t *testing.T) {
	for body, want := range map[string]bool{
		`{"stop":"end"}`: true, `{"stop":["x","e\u006ed"]}`: true, `{"stop":["x",null]}`: false, `{"stop":null}`: false,
		`{"stop":"ends"}`: false, `{"stop":[["end"]]}`: false, `{"stop":{"end":1}}`: false, `{"a":"end"}`: false,
	} {
		r, err := connector.ParseRequest(connector.APICompletions, []byte(body))
		require.NoError(t, err)
		assert.Equal(t, want, contract.Request(r).StopsAt("end"), body)
	}
}
