// SPDX-License-Identifier: Apache-2.0

package enginesim

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

func renderCompletion(e *target, r *http.Request, body []byte) (any, *apiError) {
	return rendering(e, r, body, parseCompletion)
}

func renderChat(e *target, r *http.Request, body []byte) (any, *apiError) {
	all, bad := rendering(e, r, body, parseChat)
	if bad != nil {
		return nil, bad
	}
	return all[0], nil
}

func rendering(e *target, r *http.Request, body []byte, parse parser) ([]rendered, *apiError) {
	c, bad := parse(e, r, body)
	if bad == nil {
		bad = c.check(e)
	}
	if bad != nil {
		return nil, bad
	}
	all := make([]rendered, 0, len(c.gens))
	for _, g := range c.gens {
		all = append(all, rendered{RequestID: g.name, TokenIDs: g.prompt, Sampling: map[string]int{"max_tokens": g.maxTokens}, Model: c.model})
	}
	return all, nil
}
