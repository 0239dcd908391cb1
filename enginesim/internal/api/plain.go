// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// Models is the list of /v1/models.
func Models(e *Engine, created int64) any {
	permission := python.Object{"id", "modelperm-" + core.RandomHex(8), "object", "model_permission",
		"created", created, "allow_create_engine", false, "allow_sampling", true, "allow_logprobs", true,
		"allow_search_indices", false, "allow_view", true, "allow_fine_tuning", false, "organization", "*",
		"group", nil, "is_blocking", false}
	card := func(name, root string, parent, length any) python.Object {
		return python.Object{"id", name, "object", "model", "created", created, "owned_by", "vllm", "root", root,
			"parent", parent, "max_model_len", length, "permission", []python.Object{permission}}
	}
	var data []python.Object
	for _, model := range slices.Sorted(maps.Keys(e.ListedToo)) {
		data = append(data, card(model, model, nil, e.MaxModelLen))
		for _, name := range e.ListedToo[model] {
			data = append(data, card(name, "/adapters/"+name, model, nil))
		}
	}
	data = append(data, card(e.Model, e.Model, nil, e.MaxModelLen))
	for _, name := range e.Adapters.names() {
		data = append(data, card(name, "/adapters/"+name, e.Model, nil))
	}
	return python.Object{"object", "list", "data", data}
}

// plainAPI answers a POST request that makes no tokens.
type plainAPI = func(e *Engine, r *http.Request, body []byte) (any, *Error)

// PlainAPIs are vLLM's APIs that make no tokens, by path. Those that end in /render say which tokens a request's prompt
// has, in place of running it (0.32.0's OpenAPI document; with --enable-scale-out).
var PlainAPIs = map[string]plainAPI{
	"/tokenize": tokenize, "/detokenize": detokenize,
	"/v1/completions/render": renderCompletion, "/v1/chat/completions/render": renderChat,
	"/v1/load_lora_adapter": loadAdapter, "/v1/unload_lora_adapter": unloadAdapter,
}

// tokenize counts and lists the tokens of a prompt or of rendered messages.
func tokenize(e *Engine, _ *http.Request, body []byte) (any, *Error) {
	var q struct {
		Model    *string           `json:"model"`
		Prompt   *string           `json:"prompt"`
		Messages []chatMessage     `json:"messages"`
		Tools    []json.RawMessage `json:"tools"`
		Open     *bool             `json:"add_generation_prompt"`
		Strings  bool              `json:"return_token_strs"`
	}
	if bad := DecodeBody(body, &q); bad != nil {
		return nil, bad
	}
	c := &Call{N: 1}
	if q.Model != nil {
		c.model, c.known = *q.Model, true
	}
	if bad := c.Check(e); bad != nil {
		return nil, bad
	}
	var tokens []int32
	switch {
	case q.Prompt != nil:
		tokens = core.Tokenise(*q.Prompt)
	case len(q.Messages) > 0:
		tokens = render(q.Messages, q.Tools, q.Open == nil || *q.Open)
	default:
		return nil, BadField("prompt", "missing", "Field required", "{}")
	}
	var texts []string
	for _, t := range tokens {
		texts = append(texts, core.Detokenise([]int32{t}))
	}
	return python.Object{"count", len(tokens), "max_model_len", e.MaxModelLen, "tokens", tokens,
		"token_strs", when(q.Strings, texts)}, nil
}

func detokenize(_ *Engine, _ *http.Request, body []byte) (any, *Error) {
	var q struct {
		Tokens []int32 `json:"tokens"`
	}
	if bad := DecodeBody(body, &q); bad != nil {
		return nil, bad
	}
	return map[string]string{"prompt": core.Detokenise(q.Tokens)}, nil
}

func renderCompletion(e *Engine, r *http.Request, body []byte) (any, *Error) {
	return rendering(e, r, body, ParseCompletion)
}

func renderChat(e *Engine, r *http.Request, body []byte) (any, *Error) {
	all, bad := rendering(e, r, body, ParseChat)
	if bad != nil {
		return nil, bad
	}
	return all[0], nil
}

// rendering has the part of GenerateRequest that tells of the prompt.
func rendering(e *Engine, r *http.Request, body []byte, parse Parser) ([]python.Object, *Error) {
	c, bad := parse(e, r, body)
	if bad == nil {
		bad = c.Check(e)
	}
	if bad != nil {
		return nil, bad
	}
	all := make([]python.Object, 0, len(c.Gens))
	for _, g := range c.Gens {
		all = append(all, python.Object{"request_id", g.Name, "token_ids", g.Prompt, "features", nil,
			"content_parts", nil, "sampling_params", map[string]int{"max_tokens": g.MaxTokens}, "model", c.model,
			"stream", false})
	}
	return all, nil
}
