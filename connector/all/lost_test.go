// SPDX-License-Identifier: Apache-2.0

package all_test

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/names"
)

// sampling has every member that vLLM 0.32's and SGLang 0.5.23's request models read about sampling and streaming, each
// with a good value.
const sampling = `"max_tokens":9,"max_completion_tokens":9,"max_output_tokens":9,"max_new_tokens":9,"min_tokens":2,` +
	`"min_new_tokens":2,"n":1,"best_of":1,"logprobs":1,"top_logprobs":1,"logprob_token_ids":[1],"echo":false,` +
	`"prompt_logprobs":false,"prompt_logprob_start":0,"stop":["x"],"stop_token_ids":[7],"stop_sequences":["x"],` +
	`"stop_regex":"x","ignore_eos":false,"include_stop_str_in_output":false,"no_stop_trim":false,"temperature":0.5,` +
	`"top_p":0.5,"top_k":3,"min_p":0.1,"seed":1,"sampling_seed":1,"presence_penalty":0.1,"frequency_penalty":0.1,` +
	`"repetition_penalty":1.1,"length_penalty":1.0,"logit_bias":{},"allowed_token_ids":[1],"bad_words":["x"],` +
	`"skip_special_tokens":true,"spaces_between_special_tokens":true,"detokenize":true,"flat_logprobs":false,` +
	`"stream_interval":1,"thinking_token_budget":1,"watermarking":false,"structured_outputs":{},` +
	`"repetition_detection":{},"trace_decode_token_ids":[1],"routed_experts_prompt_start":0,"regex":"x",` +
	`"json_schema":"{}","ebnf":"x","structural_tag":"x","custom_params":{}`

const others = `"model":"m","stream":true,"stream_options":{"include_usage":true},"user":"u","suffix":"s",` +
	`"response_format":{"type":"text"},"tools":[],"tool_choice":"none","parallel_tool_calls":true,"metadata":{},` +
	`"reasoning_effort":"low","include":["message.output_text.logprobs"],"reasoning":{},"store":false,` +
	`"priority":0,"cache_salt":"s","session_id":"s","return_token_ids":true,"return_tokens_as_token_ids":true,` +
	`"add_special_tokens":true,"return_logprob":true,"logprob_start_len":-1,"top_logprobs_num":1,` +
	`"token_ids_logprob":[1],"output_mode":"tokens","system":"s","output_config":{},` +
	`"thinking":{"type":"enabled","budget_tokens":1024}`

var prompts = map[connector.API]string{
	connector.APIChat: `"messages":[{"role":"user","content":"a b"}]`, connector.APICompletions: `"prompt":"a b"`,
	connector.APIResponses: `"input":"a b"`, connector.APIMessages: `"messages":[{"role":"user","content":"a b"}]`,
	connector.APIGenerate: `"token_ids":[1,2,3]`, connector.APISGLang: `"text":"a b"`,
}

// Each member that a connector's prefill leg loses or changes has a rule: with a value of a wrong type the request is
// refused with the member's name, since P could not refuse it, and D's refusal would leave P's KV without a reader.
// The member's values have been asked of a real engine's models, too.
func TestEveryMemberThatAPrefillLegLosesHasARule(t *testing.T) {
	built := map[string]bool{}
	vllm, sglang := memberValues(t, vllmValues), memberValues(t, sglangValues)
	for _, name := range names.Connectors() {
		c := play.Open(t, name, needed[name])
		for _, api := range connector.APIs() {
			if !check.Of(c).Carries(api) {
				continue
			}
			body := "{" + prompts[api] + "," + sampling + "," + others + "}"
			if api == connector.APIGenerate || api == connector.APISGLang {
				body = "{" + prompts[api] + `,"sampling_params":{` + sampling + "}," + others + "}"
			}
			leg, err := play.TryPrefill(c, play.Session(t, api, body, reachable, reachable))
			if err != nil {
				continue // it needs what a side call learns first
			}
			built[name] = true
			asked := vllm
			if name == "sglang" || api == connector.APISGLang {
				asked = sglang
			}
			for _, path := range lost(t, []byte(body), []byte(leg.Body)) {
				assert.True(t, slices.ContainsFunc(asked[api], func(m measured) bool { return m.Member == path }),
					"%s, %s: no engine was asked about %s", name, api, path)
				bad := spoilt(t, []byte(body), path)
				r, err := connector.ParseRequest(api, bad)
				if err == nil {
					err = check.Of(c).CheckRequest(r)
				}
				var refused *connector.RequestError
				if assert.ErrorAs(t, err, &refused, "%s, %s: %s has no rule", name, api, path) {
					assert.Equal(t, path, refused.Param, "%s, %s", name, api)
				}
			}
		}
	}
	for _, name := range []string{"nixl", "moriio", "mooncake-ascend", "sglang", "lmcache-pd"} {
		assert.True(t, built[name], "%s: no leg was built", name)
	}
}

// reachable are the attributes that engines must have for any protocol.
var reachable = map[string]string{"receiverInitPorts": "8300", "receiverAllocPorts": "8400", "engineID": "e",
	"sideChannelPort": "5600", "bootstrapPort": "8998", "notifyPort": "61005", "handshakePort": "6301",
	"p2pPort": "7777"}

// lost returns the paths of the client's members that a leg lacks or has with another value.
func lost(t *testing.T, client, leg []byte) (paths []string) {
	was, is := object(t, client), object(t, leg)
	for _, name := range slices.Sorted(maps.Keys(was)) {
		switch {
		case name == "sampling_params":
			for _, inner := range lost(t, was[name], is[name]) {
				paths = append(paths, name+"."+inner)
			}
		case !bytes.Equal(was[name], is[name]):
			paths = append(paths, name)
		}
	}
	return paths
}

func object(t *testing.T, raw []byte) (members map[string]json.RawMessage) {
	require.NoError(t, json.Unmarshal(raw, &members))
	return members
}

// spoilt gives a member a value that no rule allows.
func spoilt(t *testing.T, body []byte, path string) []byte {
	wrong := json.RawMessage(`[{"a":[]}]`)
	members := object(t, body)
	if inner, nested := strings.CutPrefix(path, "sampling_params."); nested {
		params := object(t, members["sampling_params"])
		params[inner] = wrong
		raw, err := json.Marshal(params)
		require.NoError(t, err)
		members["sampling_params"] = raw
	} else {
		members[path] = wrong
	}
	raw, err := json.Marshal(members)
	require.NoError(t, err)
	return raw
}
