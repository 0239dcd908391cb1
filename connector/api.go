// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"bytes"
	"encoding/json"
	"math"
)

// API is a client API that a PD request can use. This file has all that pdkit knows about where an API keeps its token
// limits, stream flag, prompt and usage, so that no connector repeats it.
//
// Sources: vLLM 0.32.0's OpenAPI document, its request models (vllm/entrypoints) and recorded exchanges; SGLang's
// native /generate. The lists also have members that only older engines know (best_of): they matter only if a request
// has them.
type API uint8

// The client APIs.
const (
	APIUnknown     API = iota
	APIChat            // /v1/chat/completions
	APICompletions     // /v1/completions
	APIResponses       // /v1/responses
	APIMessages        // /v1/messages
	APIGenerate        // /inference/v1/generate: tokens in, tokens out
	APISGLang          // /generate: SGLang's own
	apiCount
)

// UsagePaths are the JSON paths (dots between members) of the token counts in a response; "" if it does not have them.
type UsagePaths struct{ Prompt, Completion, Cached string }

type apiInfo struct {
	name, path string
	sampling   string   // the object that holds the sampling members, "" for the top level
	limit      string   // the limit that a prefill leg always sets
	altLimit   string   // a second limit that the engine prefers if it is present (chat)
	prompt     string   // the member that holds the prompt
	least      int64    // the least limit that an engine accepts
	implied    int64    // the limit of a request that names none: at most so many tokens
	minimum    string   // the member that sets a minimum of tokens, which must not be above the limit
	members    []member // members within sampling that prefill legs lose or change, with the engines' rules
	usage      UsagePaths
	guarded    bool // responses hold no JSON made by the client, so a finish reason in them is the engine's own
}

var openAIUsage = UsagePaths{
	"usage.prompt_tokens", "usage.completion_tokens", "usage.prompt_tokens_details.cached_tokens",
}
var anthropicUsage = UsagePaths{"usage.input_tokens", "usage.output_tokens", "usage.cache_read_input_tokens"}

// vllmMembers are the same in three APIs of vLLM.
var vllmMembers = []member{
	{"max_tokens", byLimit, integral64}, {"min_tokens", byLimit, integral(0)},
	{"n", toOne, integral(1)}, {"best_of", toOne, integral64},
	{"logprob_token_ids", dropped, tokenIDs}, {"prompt_logprobs", dropped, logprobCount},
	{"prompt_logprob_token_ids", dropped, list},
	{"stop", byEnding, textOrTexts}, {"stop_token_ids", byEnding, tokenIDs},
}

var apis = [apiCount]apiInfo{
	APIUnknown: {name: "unknown"},
	// If a chat has both limits, max_completion_tokens counts (docs/protocols/nixl.md, recording 06). logprob_token_ids
	// is dropped together with logprobs: engines refuse it alone.
	APIChat: {
		name: "chat", path: "/v1/chat/completions", prompt: "messages", guarded: true, usage: openAIUsage,
		limit: "max_tokens", altLimit: "max_completion_tokens", least: 1, implied: math.MaxInt64, minimum: "min_tokens",
		members: append([]member{
			{"max_completion_tokens", byLimit, integral64}, {"logprobs", dropped, boolean},
			{"top_logprobs", dropped, logprobCount}, {"echo", dropped, boolean},
		}, vllmMembers...),
	},
	APICompletions: {
		name: "completions", path: "/v1/completions", prompt: "prompt", guarded: true, usage: openAIUsage,
		limit: "max_tokens", least: 1, implied: 16, minimum: "min_tokens",
		members: append([]member{{"logprobs", dropped, logprobCount}, {"echo", dropped, boolean}}, vllmMembers...),
	},
	APIResponses: {
		name: "responses", path: "/v1/responses", prompt: "input",
		limit: "max_output_tokens", least: 1, implied: math.MaxInt64,
		members: []member{
			{"max_output_tokens", byLimit, integral(1)}, {"min_tokens", byLimit, integral(0)},
			{"top_logprobs", dropped, logprobCount}, {"stop", byEnding, falsyTextOrTexts},
			{"stop_token_ids", byEnding, tokenIDs}, {"ignore_eos", byEnding, boolean},
		},
		usage: UsagePaths{"usage.input_tokens", "usage.output_tokens", "usage.input_tokens_details.cached_tokens"},
	},
	APIMessages: {
		name: "messages", path: "/v1/messages", prompt: "messages", usage: anthropicUsage,
		limit: "max_tokens", least: 1, implied: math.MaxInt64,
		members: []member{
			{"max_tokens", byLimit, integral(1)}, {"min_tokens", byLimit, integral(0)},
			{"stop_sequences", byEnding, texts},
		},
	},
	APIGenerate: {
		name: "generate", path: "/inference/v1/generate", prompt: "token_ids", guarded: true, usage: openAIUsage,
		sampling: "sampling_params", limit: "max_tokens", least: 1, implied: 16, minimum: "min_tokens",
		members: append([]member{
			{"logprobs", dropped, logprobCount}, {"prompt_logprob_start", dropped, integral64},
		}, vllmMembers...),
	},
	APISGLang: {
		name: "sglang", path: "/generate", prompt: "text", guarded: true,
		sampling: "sampling_params", limit: "max_new_tokens", implied: 128, minimum: "min_new_tokens",
		members: []member{
			{"max_new_tokens", byLimit, strictIntegral}, {"min_new_tokens", byLimit, strictMinimum},
			{"n", toOne, strictIntegral}, {"stop", byEnding, textOrTexts}, {"stop_token_ids", byEnding, tokenIDs},
		},
		usage: UsagePaths{"meta_info.prompt_tokens", "meta_info.completion_tokens", "meta_info.cached_tokens"},
	},
}

// APIOf returns the API of a request path, or [APIUnknown]. The match is exact.
func APIOf(path string) API {
	for a := APIChat; a < apiCount; a++ {
		if apis[a].path == path {
			return a
		}
	}
	return APIUnknown
}

// APIs returns all client APIs.
func APIs() []API {
	all := make([]API, 0, apiCount-1)
	for a := APIChat; a < apiCount; a++ {
		all = append(all, a)
	}
	return all
}

func (a API) info() *apiInfo {
	if a >= apiCount {
		a = APIUnknown
	}
	return &apis[a]
}

// String returns chat, completions, responses, messages, generate or sglang.
func (a API) String() string { return a.info().name }

// Path returns the API's request path.
func (a API) Path() string { return a.info().path }

// PromptMember returns the top-level member that holds the prompt.
func (a API) PromptMember() string { return a.info().prompt }

// Limit returns the path of the member that limits the response's tokens, outermost first.
func (a API) Limit() []string {
	if i := a.info(); i.sampling != "" {
		return []string{i.sampling, i.limit}
	}
	return []string{a.info().limit}
}

// Guarded reports whether the bytes of a response are enough to find its finish reason. In the Responses and Messages
// APIs a response repeats JSON made by the client or the model, which may look like a finish reason.
func (a API) Guarded() bool { return a.info().guarded }

// ListResponse reports whether body is the list of responses that this API gives to a list of prompts (SGLang's
// /generate). All other responses are one JSON object.
func (a API) ListResponse(body []byte) bool {
	body = bytes.TrimLeft(body, " \t\r\n")
	return a == APISGLang && len(body) > 0 && body[0] == '[' && json.Valid(body)
}

// Usage returns where a response has its token counts.
func (a API) Usage() UsagePaths { return a.info().usage }
