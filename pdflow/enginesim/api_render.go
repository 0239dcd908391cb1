// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"net/http"
	"strings"
)

// renderPaths are vLLM's APIs that say which tokens a request's prompt has, in
// place of running it (0.32.0's OpenAPI document; with --enable-scale-out).
var renderPaths = map[string]bool{"/v1/completions/render": true, "/v1/chat/completions/render": true}

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

func (n *node) render(w http.ResponseWriter, r *http.Request, body []byte) {
	c, bad := generationAPIs[strings.TrimSuffix(r.URL.Path, "/render")](&n.target, r, body)
	if bad == nil {
		bad = c.check(&n.target)
	}
	if bad != nil {
		writeError(w, bad)
		return
	}
	all := make([]rendered, 0, len(c.gens))
	for _, g := range c.gens {
		all = append(all, rendered{RequestID: g.name, TokenIDs: g.prompt, Sampling: map[string]int{"max_tokens": g.maxTokens}, Model: c.model})
	}
	if strings.Contains(r.URL.Path, "chat") {
		writeJSON(w, http.StatusOK, encode(all[0]))
		return
	}
	writeJSON(w, http.StatusOK, encode(all))
}
