// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/jsonedit"
	"github.com/pdkit/pdkit/internal/request"
)

func parse(t testing.TB, api connector.API, body string) *connector.ClientRequest {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	return r
}

// bareLeg is a leg without a connector's edits: what every decode leg starts as.
func bareLeg(t testing.TB, r *connector.ClientRequest) string {
	return legOf(t, r, func(*connector.Leg) {})
}

// normalized is the prefill leg before a connector adds its own members.
func normalized(t testing.TB, r *connector.ClientRequest) string {
	return bodyOf(t, contract.NewPrefillLeg(r, &connector.Traits{}))
}

func legOf(t testing.TB, r *connector.ClientRequest, edit func(*connector.Leg)) string {
	t.Helper()
	l := contract.NewLeg(r)
	edit(l)
	return bodyOf(t, l)
}

func bodyOf(t testing.TB, l *connector.Leg) string {
	t.Helper()
	body, err := contract.Body(l)
	require.NoError(t, err)
	require.True(t, json.Valid(body), "%s", body)
	return string(body)
}

// A case of the prefill leg's normalisation: the client's body, then both legs to the byte. An empty decode is the
// client's body.
type legCase struct{ rule, client, prefill, decode string }

func runLegs(t *testing.T, api connector.API, cases []legCase) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.rule, func(t *testing.T) {
			r := parse(t, api, c.client)
			if c.decode == "" {
				c.decode = c.client
			}
			assert.Equal(t, c.prefill, normalized(t, r), "prefill leg")
			assert.Equal(t, c.decode, bareLeg(t, r), "decode leg")
			assert.Equal(t, c.client, string(r.Body()), "the client's body is never written to")
		})
	}
}

func TestLegsOfChat(t *testing.T) {
	runLegs(t, connector.APIChat, []legCase{
		{"a limit is set where the client sent none",
			`{"model":"m","messages":[{"role":"user","content":"hi"}]}`,
			`{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"stream":false}`, ""},
		{"max_tokens becomes 1 where it stands",
			`{"max_tokens":512,"messages":[]}`, `{"max_tokens":1,"messages":[],"stream":false}`, ""},
		{"max_completion_tokens wins over max_tokens, so both become 1",
			`{"messages":[],"max_completion_tokens":8,"max_tokens":1}`,
			`{"messages":[],"max_completion_tokens":1,"max_tokens":1,"stream":false}`, ""},
		{"max_completion_tokens alone becomes 1, beside max_tokens",
			`{"max_completion_tokens":8,"messages":[]}`,
			`{"max_completion_tokens":1,"messages":[],"max_tokens":1,"stream":false}`, ""},
		{"limits of null become 1",
			`{"max_completion_tokens":null,"max_tokens":null,"messages":[]}`,
			`{"max_completion_tokens":1,"max_tokens":1,"messages":[],"stream":false}`, ""},
		{"min_tokens goes: above max_tokens it is a 400",
			`{"messages":[],"min_tokens":5,"max_tokens":9}`, `{"messages":[],"max_tokens":1,"stream":false}`, ""},
		{"P never streams, and stream_options without a stream is a 400",
			`{"stream":true,"stream_options":{"include_usage":true},"messages":[]}`,
			`{"stream":false,"messages":[],"max_tokens":1}`, ""},
		{"stream_options goes although the client did not stream",
			`{"stream":false,"stream_options":{"include_usage":true},"messages":[]}`,
			`{"stream":false,"messages":[],"max_tokens":1}`, ""},
		{"one response: n and best_of become 1 where they are given",
			`{"messages":[],"n":3,"best_of":4}`, `{"messages":[],"n":1,"best_of":1,"max_tokens":1,"stream":false}`, ""},
		{"n of null stays null",
			`{"messages":[],"n":null}`, `{"messages":[],"n":null,"max_tokens":1,"stream":false}`, ""},
		{"null stays, since engines that refuse it must do so on P, too",
			`{"messages":[],"min_tokens":null,"echo":null,"stream":null}`,
			`{"messages":[],"min_tokens":null,"echo":null,"stream":null,"max_tokens":1}`, ""},
		{"log probabilities and echo are D's, logprob_token_ids with them",
			`{"logprobs":true,"top_logprobs":3,"logprob_token_ids":[1],"prompt_logprobs":1,"echo":false,` +
				`"messages":[]}`, `{"messages":[],"max_tokens":1,"stream":false}`, ""},
		{"what shapes the prompt is the same on both legs",
			`{"messages":[],"tools":[{"type":"function"}],"tool_choice":"none",` +
				`"response_format":{"type":"json_object"},"chat_template":"x","chat_template_kwargs":{"a":1},` +
				`"add_generation_prompt":false,"continue_final_message":true,"reasoning_effort":"low",` +
				`"documents":[{}],"mm_processor_kwargs":{},"add_special_tokens":true,"truncate_prompt_tokens":5,` +
				`"cache_salt":"s","priority":2,"model":"lora"}`,
			`{"messages":[],"tools":[{"type":"function"}],"tool_choice":"none",` +
				`"response_format":{"type":"json_object"},"chat_template":"x","chat_template_kwargs":{"a":1},` +
				`"add_generation_prompt":false,"continue_final_message":true,"reasoning_effort":"low",` +
				`"documents":[{}],"mm_processor_kwargs":{},"add_special_tokens":true,"truncate_prompt_tokens":5,` +
				`"cache_salt":"s","priority":2,"model":"lora","max_tokens":1,"stream":false}`, ""},
		{"escapes, white space, numbers, unknown members and their order keep their bytes",
			"{ \"messages\" : [ {\"content\":\"\\u00e4\\/\\n\\ud83d\\ude00 ü\"} ] ,\n\t\"seed\":9223372036854775808, " +
				"\"temperature\":1.0e-00,\"x\":{\"x\":[ ]},\r\n\"max_tokens\" : 77 }",
			"{ \"messages\" : [ {\"content\":\"\\u00e4\\/\\n\\ud83d\\ude00 ü\"} ] ,\n\t\"seed\":9223372036854775808, " +
				"\"temperature\":1.0e-00,\"x\":{\"x\":[ ]},\r\n\"max_tokens\" : 1,\"stream\":false }", ""},
		{"members are found however their names are escaped",
			`{"max\u005ftokens":5,"\u0073tream":true,"min_t\u006fkens":2,"messages":[]}`,
			`{"max\u005ftokens":1,"\u0073tream":false,"messages":[]}`, ""},
		{"names are matched in their case",
			`{"Max_Tokens":5,"STREAM":true,"messages":[]}`,
			`{"Max_Tokens":5,"STREAM":true,"messages":[],"max_tokens":1,"stream":false}`, ""},
		{"an empty object is a request too", `{}`, `{"max_tokens":1,"stream":false}`, ""},
	})
}

func TestLegsOfCompletions(t *testing.T) {
	runLegs(t, connector.APICompletions, []legCase{
		{"a limit is set where the client sent none", `{"prompt":"hi"}`,
			`{"prompt":"hi","max_tokens":1,"stream":false}`, ""},
		{"max_completion_tokens means nothing here and stays",
			`{"prompt":"hi","max_completion_tokens":8}`,
			`{"prompt":"hi","max_completion_tokens":8,"max_tokens":1,"stream":false}`, ""},
		{"token ids keep their bytes", `{"prompt":[ 1,2e0 ,3 ],"max_tokens":2}`,
			`{"prompt":[ 1,2e0 ,3 ],"max_tokens":1,"stream":false}`, ""},
		{"what only costs is taken from P",
			`{"prompt":"hi","n":2,"best_of":3,"logprobs":0,"logprob_token_ids":[4],"prompt_logprobs":1,"echo":true,` +
				`"min_tokens":1,"stream":true,"stream_options":{},"suffix":"s"}`,
			`{"prompt":"hi","n":1,"best_of":1,"stream":false,"suffix":"s","max_tokens":1}`, ""},
	})
}

func TestLegsOfResponses(t *testing.T) {
	runLegs(t, connector.APIResponses, []legCase{
		{"the limit is max_output_tokens, set where the client sent none", `{"input":"hi"}`,
			`{"input":"hi","max_output_tokens":1,"stream":false}`, ""},
		{"max_tokens means nothing here and stays", `{"input":"hi","max_tokens":3,"max_output_tokens":4}`,
			`{"input":"hi","max_tokens":3,"max_output_tokens":1,"stream":false}`, ""},
		{"top_logprobs goes; instructions, reasoning, tools, store stay",
			`{"input":[{}],"top_logprobs":2,"instructions":"i","reasoning":{"effort":"low"},"tools":[],"store":true,` +
				`"stream":true}`,
			`{"input":[{}],"instructions":"i","reasoning":{"effort":"low"},"tools":[],"store":true,"stream":false,` +
				`"max_output_tokens":1}`, ""},
		{"request_id goes from both legs: here it would win over the header's",
			`{"request_id":"mine","input":"hi"}`, `{"input":"hi","max_output_tokens":1,"stream":false}`,
			`{"input":"hi"}`},
	})
}

func TestLegsOfMessages(t *testing.T) {
	runLegs(t, connector.APIMessages, []legCase{
		{"max_tokens becomes 1; system, stop_sequences stay",
			`{"model":"m","system":"s","messages":[],"max_tokens":4096,"stop_sequences":["x"],"stream":true}`,
			`{"model":"m","system":"s","messages":[],"max_tokens":1,"stop_sequences":["x"],"stream":false}`, ""},
	})
}

func TestLegsOfGenerate(t *testing.T) {
	runLegs(t, connector.APIGenerate, []legCase{
		{"the limit sits inside sampling_params",
			`{"token_ids":[1,2],"sampling_params":{"temperature":0,"max_tokens":16}}`,
			`{"token_ids":[1,2],"sampling_params":{"temperature":0,"max_tokens":1},"stream":false}`, ""},
		{"and is made there where the client sent none",
			`{"sampling_params":{},"token_ids":[1]}`, `{"sampling_params":{"max_tokens":1},"token_ids":[1],` +
				`"stream":false}`, ""},
		{"sampling_params of null, or none, become an object",
			`{"sampling_params":null,"token_ids":[1]}`,
			`{"sampling_params":{"max_tokens":1},"token_ids":[1],"stream":false}`, ""},
		{"none at all", `{"token_ids":[1]}`, `{"token_ids":[1],"sampling_params":{"max_tokens":1},"stream":false}`, ""},
		{"what only costs is taken from sampling_params, and the rest of it keeps its bytes",
			`{"token_ids":[1],"sampling_params":{"seed":12345678901234567890, "stop" : ["\u0041"],"n":2,"best_of":2,` +
				`"min_tokens":3,"logprobs":1,"logprob_token_ids":[5],"prompt_logprobs":0,` +
				`"prompt_logprob_token_ids":[[1]],"prompt_logprob_start":1,"top_p":1.00},"stream":true,` +
				`"stream_options":{"include_usage":true}}`,
			`{"token_ids":[1],"sampling_params":{"seed":12345678901234567890, "stop" : ["\u0041"],"n":1,"best_of":1,` +
				`"top_p":1.00,"max_tokens":1},"stream":false}`, ""},
		{"a limit at the top level means nothing here and stays",
			`{"token_ids":[1],"max_tokens":9,"sampling_params":{"max_tokens":8}}`,
			`{"token_ids":[1],"max_tokens":9,"sampling_params":{"max_tokens":1},"stream":false}`, ""},
	})
}

func TestLegsOfSGLang(t *testing.T) {
	runLegs(t, connector.APISGLang, []legCase{
		{"the limit is sampling_params.max_new_tokens",
			`{"text":"hi","sampling_params":{"max_new_tokens":16,"min_new_tokens":4,"n":2},"stream":true}`,
			`{"text":"hi","sampling_params":{"max_new_tokens":1,"n":1},"stream":false}`, ""},
		{"its own rendezvous members are the connector's business, never the client's",
			`{"text":"hi","bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":2}`,
			`{"text":"hi","sampling_params":{"max_new_tokens":1},"stream":false}`, `{"text":"hi"}`},
	})
}

func TestClientsTransferMembersReachNoLeg(t *testing.T) {
	for _, c := range []struct{ rule, client, both string }{
		{"at the top level, each of them",
			`{"kv_transfer_params":{"do_remote_prefill":true},"a":1,"ec_transfer_params":{},` +
				`"disaggregated_params":{},"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":2}`, `{"a":1}`},
		{"of whatever type", `{"a":1,"kv_transfer_params":null,"ec_transfer_params":"x","bootstrap_room":[1]}`,
			`{"a":1}`},
		{"however the name is spelt", `{"kv_transfer\u005fparams":{},"a":1,"\u0062ootstrap_host":"h"}`, `{"a":1}`},
		{"names that only look alike are the client's",
			`{"KV_transfer_params":{},"kv_transfer_params ":1,"xkv_transfer_params":{}}`,
			`{"KV_transfer_params":{},"kv_transfer_params ":1,"xkv_transfer_params":{}}`},
		{"request_id, which would win over the header or stand for it", `{"a":1,"request_id":"x","request\u005fid2":1}`,
			`{"a":1,"request\u005fid2":1}`},
		{"inside vllm_xargs", `{"vllm_xargs":{"a":1,"kv_transfer_params":{"x":1},"b":2}}`,
			`{"vllm_xargs":{"a":1,"b":2}}`},
		{"inside vllm_xargs, escaped", `{"vllm\u005fxargs":{"kv_transfer\u005fparams":{}}}`, `{"vllm\u005fxargs":{}}`},
		{"inside sampling_params", `{"sampling_params":{"ec_transfer_params":1,"a":1}}`, `{"sampling_params":{"a":1}}`},
		{
			"inside sampling_params.extra_args",
			`{"sampling_params":{"extra_args":{"kv_transfer_params":{"do_remote_prefill":true},"a":1},"b":2}}`,
			`{"sampling_params":{"extra_args":{"a":1},"b":2}}`,
		},
		{"inside sampling_params.extra_args, escaped",
			`{"sampling_params":{"extra\u005fargs":{"kv\u005ftransfer_params":{}}}}`,
			`{"sampling_params":{"extra\u005fargs":{}}}`},
		{"no deeper, where no engine reads them",
			`{"sampling_params":{"extra_args":{"extra_args":{"kv_transfer_params":1}}}}`,
			`{"sampling_params":{"extra_args":{"extra_args":{"kv_transfer_params":1}}}}`},
		{"other places are content", `{"messages":[{"kv_transfer_params":1}],"metadata":{"kv_transfer_params":"x"}}`,
			`{"messages":[{"kv_transfer_params":1}],"metadata":{"kv_transfer_params":"x"}}`},
		{"holders without any keep every byte", `{"vllm_xargs":{ "a" : 1.0 },"sampling_params":{"extra_args":{ }}}`,
			`{"vllm_xargs":{ "a" : 1.0 },"sampling_params":{"extra_args":{ }}}`},
		{"holders of another type are the engine's to refuse",
			`{"vllm_xargs":[{"kv_transfer_params":1}],"sampling_params":"kv_transfer_params"}`,
			`{"vllm_xargs":[{"kv_transfer_params":1}],"sampling_params":"kv_transfer_params"}`},
		{"holders of null stay null", `{"vllm_xargs":null,"sampling_params":null}`,
			`{"vllm_xargs":null,"sampling_params":null}`},
		{"extra_args of another type too", `{"sampling_params":{"extra_args":[1]}}`,
			`{"sampling_params":{"extra_args":[1]}}`},
	} {
		t.Run(c.rule, func(t *testing.T) {
			assert.Equal(t, c.both, bareLeg(t, parse(t, connector.APIChat, c.client)))
		})
	}
}

func TestParamsStandWhereTheClientsStood(t *testing.T) {
	r := parse(t, connector.APIChat, `{"kv_transfer_params":{"evil":1},"messages":[]}`)
	got := legOf(t, r, func(l *connector.Leg) { l.Params(json.RawMessage(`{ "a" : 1 }`)) })
	assert.Equal(t, `{"kv_transfer_params":{ "a" : 1 },"messages":[]}`, got)
}

func TestParamsOfSeveralConnectorsMerge(t *testing.T) {
	r := parse(t, connector.APIChat, `{"a":1}`)
	assert.Equal(t, `{"a":1,"kv_transfer_params":{"x":1,"y":12345678901234567890}}`,
		legOf(t, r, func(l *connector.Leg) {
			l.Param("x", json.RawMessage(`1`))
			l.Params(json.RawMessage(`{"x":1,"y":12345678901234567890}`))
		}))
	l := contract.NewLeg(r)
	l.Param("x", json.RawMessage(`1`))
	l.Params(json.RawMessage(`{"x":2}`))
	_, err := contract.Body(l)
	assert.EqualError(t, err, "kv_transfer_params.x is set twice, to different values", "a clash shows; no side wins")
}

func TestLastEditOfAMemberWins(t *testing.T) {
	r := parse(t, connector.APIChat, `{"a":1,"b":2}`)
	assert.Equal(t, `{"b":2,"c":4}`, legOf(t, r, func(l *connector.Leg) {
		l.Set("a", json.RawMessage(`9`))
		l.Delete("a")
		l.Delete("c")
		l.Set("c", json.RawMessage(`3`))
		l.Set("c", json.RawMessage(`4`))
		l.Delete("not there")
	}))
}

func TestSetAtMakesTheObjectsOnTheWay(t *testing.T) {
	for client, want := range map[string]string{
		`{}`:                   `{"a":{"b":{"c":7}}}`,
		`{"a":null}`:           `{"a":{"b":{"c":7}}}`,
		`{"a":{"x":1,"b":{}}}`: `{"a":{"x":1,"b":{"c":7}}}`,
		`{"a":{"b":{"c":1}}}`:  `{"a":{"b":{"c":7}}}`,
	} {
		assert.Equal(t, want, legOf(t, parse(t, connector.APIChat, client), func(l *connector.Leg) {
			l.SetAt([]string{"a", "b", "c"}, json.RawMessage(`7`))
		}))
	}
	for _, client := range []string{`{"a":1}`, `{"a":[]}`, `{"a":{"b":"x"}}`} {
		l := contract.NewLeg(parse(t, connector.APIChat, client))
		l.SetAt([]string{"a", "b", "c"}, json.RawMessage(`7`))
		_, err := contract.Body(l)
		assert.ErrorContains(t, err, "a: not a well-formed object", client)
	}
	l := contract.NewLeg(parse(t, connector.APIChat, `{}`))
	l.SetAt(nil, json.RawMessage(`7`))
	_, err := contract.Body(l)
	assert.Error(t, err)
}

func TestLimitTokensToMoreThanOne(t *testing.T) {
	r := parse(t, connector.APIGenerate, `{"sampling_params":{"max_tokens":50,"min_tokens":9}}`)
	assert.Equal(t, `{"sampling_params":{"max_tokens":12}}`, legOf(t, r, func(l *connector.Leg) { l.LimitTokens(12) }))
	r = parse(t, connector.APIChat, `{"max_completion_tokens":50,"min_tokens":20,"n":2,"stream":true}`)
	assert.Equal(t, `{"max_completion_tokens":12,"n":2,"stream":true,"max_tokens":12}`,
		legOf(t, r, func(l *connector.Leg) { l.LimitTokens(12) }),
		"min_tokens could exceed it; all else is another method's")
}

func TestALegOfAnUnknownAPICannotBeLimited(t *testing.T) {
	r := parse(t, connector.APIUnknown, `{"a":1}`)
	assert.Equal(t, `{"a":1}`, bareLeg(t, r))
	_, err := contract.Body(contract.NewPrefillLeg(r, &connector.Traits{}))
	assert.ErrorContains(t, err, "unknown", "rather than a leg without any limit")
}

func TestAPrefillLegHasNoThinkingBudgetAboveItsLimit(t *testing.T) {
	for _, c := range []struct {
		rule, client, want string
		remote             bool // the leg has do_remote_decode
	}{
		{"a budget must be less than max_tokens, so it cannot stand beside a limit of 1",
			`{"a":1,"thinking":{"budget_tokens":1024}}`, `{"a":1,"max_tokens":1,"stream":false}`, false},
		{"vLLM excepts legs with do_remote_decode", `{"thinking":{"budget_tokens":1024}}`,
			`{"thinking":{"budget_tokens":1024},"max_tokens":1,"stream":false,` +
				`"kv_transfer_params":{"do_remote_decode":true}}`, true},
		{"thinking without a budget stays: it may shape the prompt", `{"thinking":{"type":"disabled"}}`,
			`{"thinking":{"type":"disabled"},"max_tokens":1,"stream":false}`, false},
		{"null stays", `{"thinking":null}`, `{"thinking":null,"max_tokens":1,"stream":false}`, false},
		{"another type is the engine's to refuse", `{"thinking":"budget_tokens"}`,
			`{"thinking":"budget_tokens","max_tokens":1,"stream":false}`, false},
		{"absent", `{}`, `{"max_tokens":1,"stream":false}`, false},
	} {
		t.Run(c.rule, func(t *testing.T) {
			l := contract.NewPrefillLeg(parse(t, connector.APIMessages, c.client), &connector.Traits{})
			if c.remote {
				l.Param("do_remote_decode", json.RawMessage("true"))
			}
			assert.Equal(t, c.want, bodyOf(t, l))
		})
	}
	const client = `{"thinking":{"budget_tokens":1024}}`
	assert.Contains(t, normalized(t, parse(t, connector.APIChat, client)), "budget", "other APIs do not know it")
	raw := contract.NewPrefillLeg(parse(t, connector.APIMessages, client), &connector.Traits{RawPrefill: true})
	assert.Equal(t, client, bodyOf(t, raw))
}

func TestLegPathHeaderAndBody(t *testing.T) {
	r := parse(t, connector.APIMessages, `{"a":1}`)
	l := contract.NewLeg(r)
	assert.Same(t, r, l.Request())
	assert.Equal(t, "/v1/messages", contract.Path(l))
	l.SetPath("/v1/completions")
	assert.Equal(t, "/v1/completions", contract.Path(l))
	l.SetHeader("X-A", "1")
	l.SetHeader("X-B", "2")
	assert.Equal(t, []request.Header{{Name: "X-A", Value: "1"}, {Name: "X-B", Value: "2"}}, contract.Leg(l).Headers)
	l.SetBody(json.RawMessage(`{ "other" : true }`))
	body, err := contract.Body(l)
	require.NoError(t, err)
	assert.Equal(t, `{ "other" : true }`, string(body))
	l.SetBody(json.RawMessage(`[]`))
	_, err = contract.Body(l)
	assert.Error(t, err, "a leg's body is one JSON object")
}

func TestCurrentSeesEditsAndTheClientsNulls(t *testing.T) {
	l := contract.NewLeg(parse(t, connector.APIChat, `{"a":null,"b":1,"kv_transfer_params":{}}`))
	raw, ok := l.Current("a")
	assert.True(t, ok)
	assert.Equal(t, "null", string(raw))
	_, ok = l.Current("kv_transfer_params")
	assert.False(t, ok, "it has been removed")
	l.Delete("b")
	_, ok = l.Current("b")
	assert.False(t, ok)
	l.Set("c", json.RawMessage(`2`))
	raw, ok = l.Current("c")
	assert.True(t, ok)
	assert.Equal(t, "2", string(raw))
}

// The untouched part of a body is not copied: the splice refers to the client's own bytes.
func TestALegCostsLittleWhateverThePromptsSize(t *testing.T) {
	allocated := func(prompt int) float64 {
		body := append(append([]byte(`{"prompt":"`), make([]byte, prompt)...), `"}`...)
		for i := 11; i < len(body)-2; i++ {
			body[i] = 'x'
		}
		r, err := connector.ParseRequest(connector.APICompletions, body)
		require.NoError(t, err)
		contract.NewLeg(r) // the first two lie in the request
		contract.NewLeg(r)
		return testing.AllocsPerRun(20, func() {
			l := contract.NewPrefillLeg(r, &connector.Traits{})
			var s jsonedit.Segments
			require.NoError(t, contract.Leg(l).Splice(&s))
		})
	}
	assert.Equal(t, allocated(10), allocated(1<<20))
}
