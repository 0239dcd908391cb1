// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"encoding/json"
	"net/http"
)

type modelPermission struct {
	ID         string  `json:"id"`
	Object     string  `json:"object"`
	Created    int64   `json:"created"`
	CreateOwn  bool    `json:"allow_create_engine"`
	Sampling   bool    `json:"allow_sampling"`
	Logprobs   bool    `json:"allow_logprobs"`
	Indices    bool    `json:"allow_search_indices"`
	View       bool    `json:"allow_view"`
	FineTuning bool    `json:"allow_fine_tuning"`
	Org        string  `json:"organization"`
	Group      *string `json:"group"`
	IsBlocking bool    `json:"is_blocking"`
}

type modelCard struct {
	ID          string            `json:"id"`
	Object      string            `json:"object"`
	Created     int64             `json:"created"`
	OwnedBy     string            `json:"owned_by"`
	Root        string            `json:"root"`
	Parent      *string           `json:"parent"`
	MaxModelLen int               `json:"max_model_len"`
	Permission  []modelPermission `json:"permission"`
}

type modelList struct {
	Object string      `json:"object"`
	Data   []modelCard `json:"data"`
}

// models is the list of /v1/models.
func models(e *target, created int64) any {
	return modelList{Object: "list", Data: []modelCard{{
		ID: e.model, Object: "model", Created: created, OwnedBy: "vllm", Root: e.model, MaxModelLen: e.maxModelLen,
		Permission: []modelPermission{{
			ID: "modelperm-" + randomHex(8), Object: "model_permission", Created: created, Sampling: true, Logprobs: true, View: true, Org: "*",
		}},
	}}}
}

// plainAPI answers a POST request that makes no tokens.
type plainAPI = func(e *target, r *http.Request, body []byte) (any, *apiError)

// plainAPIs are vLLM's APIs that make no tokens, by path. Those that end in /render say which tokens a request's prompt
// has, in place of running it (0.32.0's OpenAPI document; with --enable-scale-out).
var plainAPIs = map[string]plainAPI{
	"/tokenize": tokenize, "/detokenize": detokenize,
	"/v1/completions/render": renderCompletion, "/v1/chat/completions/render": renderChat,
}

// tokenize counts and lists the tokens of a prompt or of rendered messages.
func tokenize(e *target, _ *http.Request, body []byte) (any, *apiError) {
	var q struct {
		Model    *string           `json:"model"`
		Prompt   *string           `json:"prompt"`
		Messages []chatMessage     `json:"messages"`
		Tools    []json.RawMessage `json:"tools"`
		Open     *bool             `json:"add_generation_prompt"`
		Strings  bool              `json:"return_token_strs"`
	}
	if bad := decodeBody(body, &q); bad != nil {
		return nil, bad
	}
	c := &call{n: 1}
	if q.Model != nil {
		c.model, c.known = *q.Model, true
	}
	if bad := c.check(e); bad != nil {
		return nil, bad
	}
	var tokens []int32
	switch {
	case q.Prompt != nil:
		tokens = tokenise(*q.Prompt)
	case len(q.Messages) > 0:
		tokens = render(q.Messages, q.Tools, q.Open == nil || *q.Open)
	default:
		return nil, badField("prompt", "missing", "Field required", "{}")
	}
	answer := struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []int32  `json:"tokens"`
		Strings     []string `json:"token_strs"`
	}{len(tokens), e.maxModelLen, tokens, nil}
	if q.Strings {
		for _, t := range tokens {
			answer.Strings = append(answer.Strings, detokenise([]int32{t}))
		}
	}
	return answer, nil
}

func detokenize(_ *target, _ *http.Request, body []byte) (any, *apiError) {
	var q struct {
		Tokens []int32 `json:"tokens"`
	}
	if bad := decodeBody(body, &q); bad != nil {
		return nil, bad
	}
	return map[string]string{"prompt": detokenise(q.Tokens)}, nil
}
