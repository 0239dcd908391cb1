// SPDX-License-Identifier: Apache-2.0

package request

import (
	"bytes"
	"encoding/json"
	"math"
)

// API is a client API that a PD request can use. This file has all that pdkit knows about where an API keeps its token
// limits, stream flag, prompt and usage, so that no connector repeats it. connector.API has the same numbers.
//
// Sources: vLLM 0.32.0's OpenAPI document, its request models (vllm/entrypoints) and recorded exchanges; SGLang's
// native /generate. The lists also have members that only older engines know (best_of): they matter only if a request
// has them.
type API uint8

// The client APIs.
const (
	Unknown     API = iota
	Chat            // /v1/chat/completions
	Completions     // /v1/completions
	Responses       // /v1/responses
	Messages        // /v1/messages
	Generate        // /inference/v1/generate: tokens in, tokens out
	SGLang          // /generate: SGLang's own
	apiCount
)

// Usage are the JSON paths (dots between members) of the token counts in a response; "" if it does not have them.
// Created are the tokens of the prompt that went into the cache.
type Usage struct{ Prompt, Completion, Cached, Created string }

// Info is what is known of an API.
type Info struct {
	Name, Path string
	Sampling   string   // the object that holds the sampling members, "" for the top level
	Limit      string   // the limit that a prefill leg always sets
	AltLimit   string   // a second limit that the engine prefers if it is present (chat)
	Prompt     string   // the member that holds the prompt
	Least      int64    // the least limit that an engine accepts
	Implied    int64    // the limit of a request that names none: at most so many tokens
	Minimum    string   // the member that sets a minimum of tokens, which must not be above the limit
	Members    []Member // members within Sampling that prefill legs lose or change, with the engines' rules
	Usage      Usage
	// Guarded is true if the bytes of a response are enough to find its finish reason. In the Responses and Messages
	// APIs a response repeats JSON made by the client or the model, which may look like a finish reason.
	Guarded bool
	// Endings are the names of the events that end a stream of such an API, and say how.
	Endings []string
}

var openAIUsage = Usage{
	"usage.prompt_tokens", "usage.completion_tokens", "usage.prompt_tokens_details.cached_tokens",
	"usage.prompt_tokens_details.created_cache_tokens",
}
var anthropicUsage = Usage{
	"usage.input_tokens", "usage.output_tokens", "usage.cache_read_input_tokens", "usage.cache_creation_input_tokens",
}

// vllmMembers are the same in three APIs of vLLM.
var vllmMembers = []Member{
	{"max_tokens", ByLimit, integral64}, {"min_tokens", ByLimit, integral(0)},
	{"n", ToOne, integral(1)}, {"best_of", ToOne, integral64},
	{"logprob_token_ids", Dropped, tokenIDs}, {"prompt_logprobs", Dropped, logprobCount},
	{"prompt_logprob_token_ids", Dropped, list},
	{"stop", ByEnding, textOrTexts}, {"stop_token_ids", ByEnding, tokenIDs},
}

var apis = [apiCount]Info{
	Unknown: {Name: "unknown"},
	// If a chat has both limits, max_completion_tokens counts (docs/protocols/nixl.md, recording 06). logprob_token_ids
	// is Dropped together with logprobs: engines refuse it alone.
	Chat: {
		Name: "chat", Path: "/v1/chat/completions", Prompt: "messages", Guarded: true, Usage: openAIUsage,
		Limit: "max_tokens", AltLimit: "max_completion_tokens", Least: 1, Implied: math.MaxInt64, Minimum: "min_tokens",
		Members: append([]Member{
			{"max_completion_tokens", ByLimit, integral64}, {"logprobs", Dropped, boolean},
			{"top_logprobs", Dropped, logprobCount}, {"echo", Dropped, boolean},
		}, vllmMembers...),
	},
	Completions: {
		Name: "completions", Path: "/v1/completions", Prompt: "prompt", Guarded: true, Usage: openAIUsage,
		Limit: "max_tokens", Least: 1, Implied: 16, Minimum: "min_tokens",
		Members: append([]Member{{"logprobs", Dropped, logprobCount}, {"echo", Dropped, boolean}}, vllmMembers...),
	},
	Responses: {
		Name: "responses", Path: "/v1/responses", Prompt: "input",
		Endings: []string{"response.completed", "response.incomplete", "response.failed"},
		Limit:   "max_output_tokens", Least: 1, Implied: math.MaxInt64,
		Members: []Member{
			{"max_output_tokens", ByLimit, integral(1)}, {"min_tokens", ByLimit, integral(0)},
			{"top_logprobs", Dropped, logprobCount}, {"stop", ByEnding, falsyTextOrTexts},
			{"stop_token_ids", ByEnding, tokenIDs}, {"ignore_eos", ByEnding, boolean},
		},
		Usage: Usage{
			"usage.input_tokens", "usage.output_tokens", "usage.input_tokens_details.cached_tokens",
			"usage.input_tokens_details.cache_write_tokens",
		},
	},
	Messages: {
		Name: "messages", Path: "/v1/messages", Prompt: "messages", Usage: anthropicUsage,
		Endings: []string{"message_delta"},
		Limit:   "max_tokens", Least: 1, Implied: math.MaxInt64,
		Members: []Member{
			{"max_tokens", ByLimit, integral(1)}, {"min_tokens", ByLimit, integral(0)},
			{"stop_sequences", ByEnding, texts},
		},
	},
	Generate: {
		Name: "generate", Path: "/inference/v1/generate", Prompt: "token_ids", Guarded: true, Usage: openAIUsage,
		Sampling: "sampling_params", Limit: "max_tokens", Least: 1, Implied: 16, Minimum: "min_tokens",
		Members: append([]Member{
			{"logprobs", Dropped, logprobCount}, {"prompt_logprob_start", Dropped, integral64},
		}, vllmMembers...),
	},
	SGLang: {
		Name: "sglang", Path: "/generate", Prompt: "text", Guarded: true,
		Sampling: "sampling_params", Limit: "max_new_tokens", Implied: 128, Minimum: "min_new_tokens",
		Members: []Member{
			{"max_new_tokens", ByLimit, strictIntegral}, {"min_new_tokens", ByLimit, strictMinimum},
			{"n", ToOne, strictIntegral}, {"stop", ByEnding, textOrTexts}, {"stop_token_ids", ByEnding, tokenIDs},
		},
		Usage: Usage{"meta_info.prompt_tokens", "meta_info.completion_tokens", "meta_info.cached_tokens", ""},
	},
}

// APIOf returns the API of a request path, or [Unknown]. The match is exact.
func APIOf(path string) API {
	for a := Chat; a < apiCount; a++ {
		if apis[a].Path == path {
			return a
		}
	}
	return Unknown
}

// APIs returns all client APIs.
func APIs() []API {
	all := make([]API, 0, apiCount-1)
	for a := Chat; a < apiCount; a++ {
		all = append(all, a)
	}
	return all
}

// Info returns what is known of the API.
func (a API) Info() *Info {
	if a >= apiCount {
		a = Unknown
	}
	return &apis[a]
}

// ListResponse reports whether body is the list of responses that this API gives to a list of prompts (SGLang's
// /generate). All other responses are one JSON object.
func (i *Info) ListResponse(body []byte) bool {
	body = bytes.TrimLeft(body, " \t\r\n")
	return i == &apis[SGLang] && len(body) > 0 && body[0] == '[' && json.Valid(body)
}
