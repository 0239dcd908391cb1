// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"encoding/json"
	"net/http"
)

// health answers 503 while a dead engine's server goes down.
func (n *node) health(w http.ResponseWriter) {
	writeHealth(w, n.ended() == nil)
}

func (n *node) version(w http.ResponseWriter) {
	writeJSON(w, http.StatusOK, encode(map[string]string{"version": version}))
}

func (n *node) serverLoad(w http.ResponseWriter) {
	writeJSON(w, http.StatusOK, encode(map[string]int{"server_load": n.inFlight()}))
}

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

func (n *node) models(w http.ResponseWriter) {
	created := n.started.Unix()
	writeJSON(w, http.StatusOK, encode(modelList{Object: "list", Data: []modelCard{{
		ID: n.cfg.Model, Object: "model", Created: created, OwnedBy: "vllm", Root: n.cfg.Model, MaxModelLen: n.cfg.MaxModelLen,
		Permission: []modelPermission{{
			ID: "modelperm-" + randomHex(8), Object: "model_permission", Created: created, Sampling: true, Logprobs: true, View: true, Org: "*",
		}},
	}}}))
}

// tokenize counts and lists the tokens of a prompt or of rendered messages.
func (n *node) tokenize(w http.ResponseWriter, body []byte) {
	var q struct {
		Model    *string           `json:"model"`
		Prompt   *string           `json:"prompt"`
		Messages []chatMessage     `json:"messages"`
		Tools    []json.RawMessage `json:"tools"`
		Open     *bool             `json:"add_generation_prompt"`
		Strings  bool              `json:"return_token_strs"`
	}
	if bad := decodeBody(body, &q); bad != nil {
		writeError(w, bad)
		return
	}
	c := &call{n: 1}
	if q.Model != nil {
		c.model, c.known = *q.Model, true
	}
	if bad := c.check(&n.target); bad != nil {
		writeError(w, bad)
		return
	}
	var tokens []int32
	switch {
	case q.Prompt != nil:
		tokens = tokenise(*q.Prompt)
	case len(q.Messages) > 0:
		tokens = render(q.Messages, q.Tools, q.Open == nil || *q.Open)
	default:
		writeError(w, badField("prompt", "missing", "Field required", "{}"))
		return
	}
	answer := struct {
		Count       int      `json:"count"`
		MaxModelLen int      `json:"max_model_len"`
		Tokens      []int32  `json:"tokens"`
		Strings     []string `json:"token_strs"`
	}{len(tokens), n.cfg.MaxModelLen, tokens, nil}
	if q.Strings {
		for _, t := range tokens {
			answer.Strings = append(answer.Strings, detokenise([]int32{t}))
		}
	}
	writeJSON(w, http.StatusOK, encode(answer))
}

func (n *node) detokenize(w http.ResponseWriter, body []byte) {
	var q struct {
		Tokens []int32 `json:"tokens"`
	}
	if bad := decodeBody(body, &q); bad != nil {
		writeError(w, bad)
		return
	}
	writeJSON(w, http.StatusOK, encode(map[string]string{"prompt": detokenise(q.Tokens)}))
}
