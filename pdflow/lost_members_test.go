// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
)

// What the flow lets pass, D does not refuse for a member's type or range: P would have computed the prompt for nobody.
func TestDRefusesNoMemberThatPDidNotSee(t *testing.T) {
	values := []string{"null", "1", "3", "1.0", "1.5", "0", "-1", "-2", "9223372036854775808", "1180591620717411303424",
		"1e30", "true", "false", `"a"`, `""`, "[]", "[1]", `["a"]`, `[""]`, "[{}]", "{}"}
	members := []string{"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "logprobs",
		"top_logprobs", "echo", "stream", "stream_options", "thinking"}
	bodies := map[connector.API]string{
		connector.APIChat:        `{"messages":[{"role":"user","content":"a b"}],%s}`,
		connector.APICompletions: `{"prompt":"a b",%s}`,
		connector.APIResponses:   `{"input":"a b",%s}`,
		connector.APIMessages:    `{"messages":[{"role":"user","content":"a b"}],%s}`,
		connector.APIGenerate:    `{"token_ids":[5,6,7],"sampling_params":{%s}}`,
	}
	x := start(t, setup{decode: enginesim.Config{KeepRequests: 100000}})
	refused, served := 0, 0
	for api, form := range bodies {
		for _, name := range members {
			for _, value := range values {
				body := fmt.Sprintf(form, `"`+name+`":`+value)
				if api == connector.APIMessages && name != "max_tokens" {
					body = strings.Replace(body, "{", `{"max_tokens":3,`, 1)
				}
				if api == connector.APIGenerate && strings.HasPrefix(name, "stream") {
					body = fmt.Sprintf(`{"token_ids":[5,6,7],"sampling_params":{},"%s":%s}`, name, value)
				}
				before := len(x.d.Requests())
				r := post(t, x.url, api.Path(), body)
				switch r.status {
				case 200:
					served++
				case 400:
					refused++
					assert.Len(t, x.d.Requests(), before, "D refused %s: %s", body, r.body)
				default:
					require.Fail(t, "neither served nor refused", "%s: %d %s", body, r.status, r.body)
				}
			}
		}
	}
	assert.Greater(t, refused, 300)
	assert.Greater(t, served, 300)
}

// Each of these bodies made P compute its prompt, or hold a task for it, before D refused it. The error names the
// member and holds no value, and neither engine gets a request.
func TestWhatDWouldRefuseIsRefusedBeforeP(t *testing.T) {
	x := start(t, setup{prefill: enginesim.Config{KeepRequests: 10}, decode: enginesim.Config{KeepRequests: 10}})
	chat, completion := connector.APIChat, connector.APICompletions
	messages, generate := connector.APIMessages, connector.APIGenerate
	const hi = `"messages":[{"role":"user","content":"a"}]`
	for _, k := range []struct {
		rule  string
		api   connector.API
		body  string
		param string
	}{
		{"a limit of 2^63", chat, `{` + hi + `,"max_tokens":9223372036854775808}`, "max_tokens"},
		{"a limit of 2^70", completion, `{"prompt":"a","max_tokens":1180591620717411303424}`, "max_tokens"},
		{"a limit of 0", completion, `{"prompt":"a","max_tokens":0}`, "max_tokens"},
		{"the limit that counts", chat, `{` + hi + `,"max_tokens":5,"max_completion_tokens":0}`,
			"max_completion_tokens"},
		{"a minimum above the limit", chat, `{` + hi + `,"max_tokens":5,"min_tokens":6}`, "min_tokens"},
		{"a minimum above completions' own limit of 16", completion, `{"prompt":"a","min_tokens":17}`, "min_tokens"},
		{"a minimum below 0", chat, `{` + hi + `,"min_tokens":-1}`, "min_tokens"},
		{"no choice", chat, `{` + hi + `,"n":0}`, "n"},
		{"too few log probabilities", completion, `{"prompt":"a","logprobs":-2}`, "logprobs"},
		{"token ids without log probabilities", chat, `{` + hi + `,"logprob_token_ids":[1]}`, "logprob_token_ids"},
		{"top without log probabilities", chat, `{` + hi + `,"top_logprobs":2}`, "top_logprobs"},
		{"options of a stream that is none", chat, `{` + hi + `,"stream_options":{"include_usage":true}}`,
			"stream_options"},
		{"an option of a wrong type", chat, `{` + hi + `,"stream":true,"stream_options":{"include_usage":"a"}}`,
			"stream_options.include_usage"},
		{"no limit where one must be given", messages, `{` + hi + `}`, "max_tokens"},
		{"a budget above the limit", messages,
			`{` + hi + `,"max_tokens":2000,"thinking":{"type":"enabled","budget_tokens":2000}}`,
			"thinking.budget_tokens"},
		{"a nested limit", generate, `{"token_ids":[1,2],"sampling_params":{"max_tokens":0}}`,
			"sampling_params.max_tokens"},
		{"an empty text", completion, `{"prompt":""}`, "prompt"},
		{"a list of nothing", completion, `{"prompt":[ ]}`, "prompt"},
		{"a list of one empty prompt", completion, `{"prompt":[ [] ]}`, "prompt"},
		{"no token", generate, `{"token_ids":[],"sampling_params":{}}`, "token_ids"},
	} {
		t.Run(k.rule, func(t *testing.T) {
			r := post(t, x.url, k.api.Path(), k.body)
			assert.Equal(t, 400, r.status, r.body)
			assert.Contains(t, r.body, k.param)
			assert.Empty(t, x.p.Requests())
			assert.Empty(t, x.d.Requests())
		})
	}
}
