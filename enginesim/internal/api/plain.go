// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"net/http"

	"github.com/pdkit/pdkit/enginesim/internal/core"
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

// Models is the list of /v1/models.
func Models(e *Engine, created int64) any {
	return modelList{Object: "list", Data: []modelCard{{
		ID: e.Model, Object: "model", Created: created, OwnedBy: "vllm", Root: e.Model, MaxModelLen: e.MaxModelLen,
		Permission: []modelPermission{{
			ID: "modelperm-" + core.RandomHex(8), Object: "model_permission", Created: created, Sampling: true,
			Logprobs: true,
			View:     true, Org: "*",
		}},
	}}}
}

// plainAPI answers a POST request that makes no tokens.
type plainAPI = func(e *Engine, r *http.Request, body []byte) (any, *Error)

// PlainAPIs are vLLM's APIs that make no tokens, by path. Those that end in /render say which tokens a request's prompt
// has, in place of running it (0.32.0's OpenAPI document; with --enable-scale-out).
var PlainAPIs = map[string]plainAPI{
	"/tokenize": tokenize, "/detokenize": detokenize,
	"/v1/completions/render": renderCompletion, "/v1/chat/completions/render": renderChat,
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
	response := struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []int32  `json:"tokens"`
		Strings     []string `json:"token_strs"`
	}{len(tokens), e.MaxModelLen, tokens, nil}
	if q.Strings {
		for _, t := range tokens {
			response.Strings = append(response.Strings, core.Detokenise([]int32{t}))
		}
	}
	return response, nil
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
