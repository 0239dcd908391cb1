// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/http"
)

// rendered is the part of GenerateRequest that tells of the prompt.
type rendered struct {
	RequestID string         `json:"request_id"`
	TokenIDs  []int32        `json:"token_ids"`
	Features  any            `json:"features"`
	Parts     any            `json:"content_parts"`
	Sampling  map[string]int `json:"sampling_params"`
	Model     string         `json:"model"`
	Stream    bool           `json:"stream"`
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

func rendering(e *Engine, r *http.Request, body []byte, parse Parser) ([]rendered, *Error) {
	c, bad := parse(e, r, body)
	if bad == nil {
		bad = c.Check(e)
	}
	if bad != nil {
		return nil, bad
	}
	all := make([]rendered, 0, len(c.Gens))
	for _, g := range c.Gens {
		all = append(all, rendered{RequestID: g.Name, TokenIDs: g.Prompt,
			Sampling: map[string]int{"max_tokens": g.MaxTokens}, Model: c.model})
	}
	return all, nil
}
