// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
)

func TestWhereEachAPIKeepsWhat(t *testing.T) {
	for api, want := range map[connector.API]struct {
		name, path, prompt string
	}{
		connector.APIChat:        {"chat", "/v1/chat/completions", "messages"},
		connector.APICompletions: {"completions", "/v1/completions", "prompt"},
		connector.APIResponses:   {"responses", "/v1/responses", "input"},
		connector.APIMessages:    {"messages", "/v1/messages", "messages"},
		connector.APIGenerate:    {"generate", "/inference/v1/generate", "token_ids"},
		connector.APISGLang:      {"sglang", "/generate", "text"},
	} {
		t.Run(want.name, func(t *testing.T) {
			assert.Equal(t, want.name, api.String())
			assert.Equal(t, want.path, api.Path())
			assert.Equal(t, want.prompt, api.PromptMember())
			assert.Equal(t, api, connector.APIOf(want.path))
			assert.Contains(t, connector.APIs(), api)
		})
	}
	assert.Len(t, connector.APIs(), 6, "and no others")
}

func TestAPIOfMatchesThePathToTheLetter(t *testing.T) {
	for _, path := range []string{"", "/", "/v1/chat/completions/", "/V1/chat/completions", "v1/completions",
		"/v1/completions?x=1", "/v1//completions", "/v1/models", "/generate/"} {
		assert.Equal(t, connector.APIUnknown, connector.APIOf(path), path)
	}
}

func TestAnAPIOutOfRangeIsUnknown(t *testing.T) {
	for _, api := range []connector.API{connector.APIUnknown, connector.APISGLang + 1, 255} {
		assert.Equal(t, "unknown", api.String())
		assert.Empty(t, api.Path())
		assert.Empty(t, api.PromptMember())
		assert.Zero(t, contract.API(api).Usage)
	}
}

// The responses are cut from recorded ones: nixl/11 (P with a warm cache), 12, 22, 24, 23 of vLLM 0.32.0; the last one
// is SGLang's shape.
func TestUsageIsReadWhereEachAPIReportsIt(t *testing.T) {
	for api, response := range map[connector.API]string{
		connector.APIChat: `{"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3,` +
			`"prompt_tokens_details":{"cached_tokens":5,"created_cache_tokens":null}}}`,
		connector.APICompletions: `{"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3,` +
			`"prompt_tokens_details":{"cached_tokens":5}}}`,
		connector.APIResponses: `{"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":5,` +
			`"cache_write_tokens":0},"output_tokens":3,"total_tokens":10}}`,
		connector.APIMessages: `{"usage":{"input_tokens":7,"output_tokens":3,"cache_creation_input_tokens":0,` +
			`"cache_read_input_tokens":5}}`,
		connector.APIGenerate: `{"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3,` +
			`"prompt_tokens_details":{"cached_tokens":5}}}`,
		connector.APISGLang: `{"meta_info":{"prompt_tokens":7,"completion_tokens":3,"cached_tokens":5}}`,
	} {
		u := contract.API(api).Usage
		assert.EqualValues(t, 7, gjson.Get(response, u.Prompt).Int(), "%v prompt", api)
		assert.EqualValues(t, 3, gjson.Get(response, u.Completion).Int(), "%v completion", api)
		assert.EqualValues(t, 5, gjson.Get(response, u.Cached).Int(), "%v cached", api)
	}
}

// Every member that vLLM 0.32.0's own OpenAPI document names is put into one request; the table says which of them a
// prefill leg changes. All others, prompt-shaping ones above all, keep their bytes on both legs.
func TestPrefillChangesTheseOfAllMembersAndNoOthers(t *testing.T) {
	const one, gone, no = "1", "", "false"
	want := map[string]map[string]string{
		"chat": {
			"max_tokens": one, "max_completion_tokens": one, "n": one, "stream": no, "stream_options": gone,
			"min_tokens": gone,
			"logprobs":   gone, "top_logprobs": gone, "logprob_token_ids": gone, "prompt_logprobs": gone, "echo": gone,
			"kv_transfer_params": gone, "ec_transfer_params": gone, "request_id": gone,
		},
		"completions": {
			"max_tokens": one, "n": one, "stream": no, "stream_options": gone, "min_tokens": gone,
			"logprobs": gone, "logprob_token_ids": gone, "prompt_logprobs": gone, "echo": gone,
			"kv_transfer_params": gone, "ec_transfer_params": gone, "request_id": gone,
		},
		"responses": {
			"max_output_tokens": one, "stream": no, "top_logprobs": gone,
			"kv_transfer_params": gone, "ec_transfer_params": gone, "request_id": gone,
		},
		"messages": {"max_tokens": one, "stream": no, "kv_transfer_params": gone, "ec_transfer_params": gone},
		"generate": {
			"sampling_params": `{"max_tokens":1}`, "stream": no, "stream_options": gone,
			"kv_transfer_params": gone, "ec_transfer_params": gone, "request_id": gone,
		},
	}
	raw, err := os.ReadFile("testdata/vllm-0.32.0-request-members.json")
	require.NoError(t, err)
	var members map[string][]string
	require.NoError(t, json.Unmarshal(raw, &members))
	require.ElementsMatch(t, slices.Collect(maps.Keys(want)), slices.Collect(maps.Keys(members)))

	for _, api := range connector.APIs() {
		if api == connector.APISGLang {
			continue
		}
		t.Run(api.String(), func(t *testing.T) {
			sent, prefill := map[string]string{}, map[string]string{}
			var parts, decodeParts []string
			for _, name := range members[api.String()] {
				sent[name] = anyValue(name)
				parts = append(parts, `"`+name+`":`+sent[name])
				if !slices.Contains([]string{"kv_transfer_params", "ec_transfer_params", "request_id"}, name) {
					decodeParts = append(decodeParts, parts[len(parts)-1])
				}
			}
			r := parse(t, api, "{"+strings.Join(parts, ",")+"}")
			assert.Equal(t, "{"+strings.Join(decodeParts, ",")+"}", bareLeg(t, r),
				"the decode leg lacks only the client's transfer members and id")
			gjson.Parse(normalized(t, r)).ForEach(func(k, v gjson.Result) bool {
				prefill[k.Str] = v.Raw
				return true
			})
			changed := map[string]string{}
			for name, value := range sent {
				if prefill[name] != value {
					changed[name] = prefill[name]
				}
			}
			assert.Equal(t, want[api.String()], changed)
		})
	}
}

// anyValue is of the right type for the members that are checked, and odd enough to show any change to the others.
func anyValue(name string) string {
	switch name {
	case "model":
		return `"m"`
	case "stream":
		return "true"
	case "stream_options":
		return `{"include_usage":true}`
	case "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n":
		return "5"
	case "sampling_params":
		return `{"max_tokens":5}`
	}
	return `[ 12345678901234567890 , {"\u0061":1.50e+01} ]`
}

// SGLang answers a list of prompts with a list. Every other whole response is an object.
func TestOnlySGLangAnswersWithAList(t *testing.T) {
	for _, a := range connector.APIs() {
		assert.Equal(t, a == connector.APISGLang,
			contract.API(a).ListResponse([]byte(" [{\"text\":\"a\"}]")), a.String())
		for _, bad := range []string{``, `{}`, `[`, `[1,]`, `"[]"`} {
			assert.False(t, contract.API(a).ListResponse([]byte(bad)), bad)
		}
	}
}
