// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
)

// The rules are the engines' own: see the table in docs/protocols/vllm.md §4.
func TestMembersThatOnlyDWouldCheck(t *testing.T) {
	plain, ends := connector.Traits{}, connector.Traits{Ending: connector.Ending{EndsByLength: true}}
	sglang := connector.Traits{APIs: connector.APIs(), SGLang: true}
	chat, completions, responses := connector.APIChat, connector.APICompletions, connector.APIResponses
	messages, generate, native := connector.APIMessages, connector.APIGenerate, connector.APISGLang
	for _, k := range []struct {
		traits connector.Traits
		api    connector.API
		body   string
		param  string // "": the request is good
	}{
		{plain, chat, `{"max_tokens":16.0,"min_tokens":16}`, ""},
		{plain, chat, `{"max_tokens":9223372036854775807,"min_tokens":1e3}`, ""},
		{plain, chat, `{"max_tokens":0,"max_completion_tokens":1}`, ""},
		{plain, chat, `{"max_tokens":1,"max_completion_tokens":null,"min_tokens":2}`, "min_tokens"},
		{plain, chat, `{"max_tokens":9,"max_completion_tokens":1,"min_tokens":2}`, "min_tokens"},
		{plain, chat, `{"logprobs":1,"top_logprobs":-1,"echo":"no","logprob_token_ids":[ 1 , 2.0]}`, ""},
		{plain, chat, `{"logprobs":2}`, "logprobs"},
		{plain, chat, `{"top_logprobs":0,"logprob_token_ids":[]}`, ""},
		{plain, chat, `{"top_logprobs":true}`, "top_logprobs"},
		{plain, chat, `{"logprobs":true,"logprob_token_ids":[1,"2"]}`, "logprob_token_ids"},
		{plain, chat, `{"logprobs":true,"logprob_token_ids":[-1]}`, "logprob_token_ids"},
		{plain, chat, `{"stream_options":{}}`, ""},
		{plain, chat, `{"min_tokens":null,"max_tokens":null,"echo":null,"n":null,"stop":null}`, ""},
		{plain, completions, `{"prompt":"a","logprobs":true,"min_tokens":16}`, ""},
		{plain, completions, `{"prompt":"a","max_tokens":null,"min_tokens":17}`, "min_tokens"},
		{plain, completions, `{"prompt":"a","echo":true,"max_tokens":0}`, ""},
		{plain, completions, `{"prompt":"a","echo":false,"max_tokens":0}`, "max_tokens"},
		{plain, completions, `{"prompt":"","prompt_embeds":"AAAA"}`, ""},
		{plain, completions, `{"prompt":"","prompt_embeds":[]}`, "prompt"},
		{plain, completions, `{"prompt":[" "]}`, ""},
		{plain, completions, `{"prompt":[""]}`, "prompt"},
		{plain, responses, `{"input":"","max_output_tokens":1,"stop":""}`, ""},
		{plain, responses, `{"max_output_tokens":0}`, "max_output_tokens"},
		{plain, messages, `{"max_tokens":null}`, "max_tokens"},
		{plain, messages, `{"max_tokens":1025,"thinking":{"type":"enabled","budget_tokens":1024}}`, ""},
		{plain, messages, `{"max_tokens":1,"thinking":{"type":"disabled"}}`, ""},
		{plain, messages, `{"max_tokens":9,"thinking":{"type":"enabled","budget_tokens":1}}`, "thinking.budget_tokens"},
		{plain, messages, `{"max_tokens":9,"thinking":{"budget_tokens":1}}`, "thinking.type"},
		{plain, messages, `{"max_tokens":9,"thinking":[]}`, "thinking"},
		{plain, generate, `{"token_ids":[1],"sampling_params":{"min_tokens":16}}`, ""},
		{plain, generate, `{"token_ids":[1],"sampling_params":{"min_tokens":17}}`, "sampling_params.min_tokens"},
		{plain, generate, `{"token_ids":[1],"sampling_params":{"max_tokens":null,"min_tokens":17}}`, ""},
		{plain, generate, `{"token_ids":[1],"sampling_params":{"logprobs":2,"logprob_token_ids":[1,2]}}`, ""},
		{plain, generate, `{"token_ids":[1],"sampling_params":{"logprobs":true,"logprob_token_ids":[1]}}`, ""},
		{plain, generate, `{"token_ids":[1],"sampling_params":{"logprobs":1,"logprob_token_ids":[1,2]}}`,
			"sampling_params.logprobs"},
		{plain, generate, `{"token_ids":[1],"sampling_params":{"prompt_logprob_start":0}}`,
			"sampling_params.prompt_logprob_start"},
		{plain, generate, `{"token_ids":[1],"sampling_params":{"max_tokens":1,"min_tokens":2}}`,
			"sampling_params.min_tokens"},
		{plain, generate, `{"token_ids":[1],"sampling_params":{"prompt_logprob_token_ids":[,]}}`,
			"sampling_params.prompt_logprob_token_ids"},

		{plain, chat, `{"stop":"","stop_token_ids":"a"}`, ""}, // P has these members, and checks them
		{ends, chat, `{"stop":["a","b"],"stop_token_ids":[1]}`, ""},
		{ends, chat, `{"stop":""}`, "stop"},
		{ends, chat, `{"stop":["a",""]}`, "stop"},
		{ends, chat, `{"stop":["a",1]}`, "stop"},
		{ends, chat, `{"stop_token_ids":["a"]}`, "stop_token_ids"},
		{ends, responses, `{"stop":"","ignore_eos":false}`, ""},
		{ends, responses, `{"ignore_eos":"a"}`, "ignore_eos"},
		{ends, messages, `{"max_tokens":1,"stop_sequences":"a"}`, "stop_sequences"},

		{sglang, native, `{"text":"a","sampling_params":{"max_new_tokens":0}}`, ""},
		{sglang, native, `{"text":"a","sampling_params":{"max_new_tokens":1.0}}`, "sampling_params.max_new_tokens"},
		{sglang, native, `{"text":"a","sampling_params":{"max_new_tokens":-1}}`, "sampling_params.max_new_tokens"},
		{sglang, native, `{"text":"a","sampling_params":{"min_new_tokens":-1}}`, "sampling_params.min_new_tokens"},
		{sglang, native, `{"text":"a","sampling_params":{"min_new_tokens":129}}`, "sampling_params.min_new_tokens"},
		{sglang, native, `{"text":"a","sampling_params":{"max_new_tokens":null,"min_new_tokens":129}}`, ""},
		{sglang, native, `{"text":""}`, "text"},
		{sglang, native, `{"input_ids":[[]]}`, "input_ids"},
		{sglang, responses, `{"max_output_tokens":2}`, ""},
		{sglang, responses, `{"max_output_tokens":1}`, "max_output_tokens"},
		{sglang, completions, `{"prompt":"a","max_tokens":null}`, "max_tokens"},
		{sglang, chat, `{"stream_options":{"include_usage":true},"logprobs":7}`, ""}, // its P checks logprobs
		{sglang, chat, `{"stream":true,"stream_options":{"include_usage":"x"}}`, "stream_options.include_usage"},
	} {
		r, err := connector.ParseRequest(k.api, []byte(k.body))
		require.NoError(t, err, k.body)
		err = (&check.Rules{Traits: k.traits}).Declared(r)
		var refused *connector.RequestError
		if k.param == "" {
			assert.NotErrorAs(t, err, &refused, "%s: %v", k.body, err)
		} else if assert.ErrorAs(t, err, &refused, k.body) {
			assert.Equal(t, k.param, refused.Param, k.body)
		}
	}
}
