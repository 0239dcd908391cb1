// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"net/http"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

type generateRequest struct {
	Model         *string         `json:"model"`
	RequestID     string          `json:"request_id"`
	TokenIDs      []int32         `json:"token_ids"`
	Sampling      *sampling       `json:"sampling_params"`
	Stream        bool            `json:"stream"`
	StreamOptions *streamOptions  `json:"stream_options"`
	CacheSalt     string          `json:"cache_salt"`
	KVParams      json.RawMessage `json:"kv_transfer_params"`
	ReturnTokens  bool            `json:"return_token_ids"`
}

// parseGenerate reads a /inference/v1/generate request: tokens in, tokens out.
func parseGenerate(_ *Engine, r *http.Request, body []byte) (*Call, *Error) {
	var q generateRequest
	if bad := DecodeBody(body, &q); bad != nil {
		return nil, bad
	}
	if q.Sampling == nil {
		return nil, BadField("sampling_params", "missing", "Field required", "{}")
	}
	s := *q.Sampling
	s.Model, s.Stream, s.StreamOptions = q.Model, q.Stream, q.StreamOptions
	s.CacheSalt, s.KVParams = q.CacheSalt, q.KVParams
	c, bad := newCall(&s)
	if bad != nil {
		return nil, bad
	}
	c.defaultLimit, c.anyOptions = 16, true
	c.id = "generate-tokens-" + requestName(r, q.RequestID)
	c.add(&s, c.id, q.TokenIDs, false)
	c.format = &generateFormat{call: c, q: &q}
	return c, nil
}

type generateFormat struct {
	call *Call
	q    *generateRequest
}

func (f *generateFormat) Whole(outs []*core.Outcome) any {
	c := f.call
	var choices []python.Object
	for i, o := range outs {
		choices = append(choices, python.Object{"index", i, "finish_reason", o.Reason, "stop_reason", o.Stop,
			"token_ids", o.Tokens, "routed_experts", nil, "sampling_mask", nil,
			"weight_versions", []python.Object{{"version", "default", "start", 0, "end", len(o.Tokens)}},
			"logprobs", nil})
	}
	return python.Object{"request_id", c.id, "model", c.model, "created", c.created,
		"usage", c.usage(outs, false, true), "prompt_logprobs", nil, "prompt_token_id_logprobs", nil,
		"prompt_token_ids", when(f.q.ReturnTokens, c.Gens[0].Prompt), "mm_placeholders", nil, "metrics", nil,
		"kv_transfer_params", outs[0].Params, "ec_transfer_params", nil, "output_mode", "tokens", "choices", choices}
}

func (f *generateFormat) chunk(choices ...python.Object) python.Object {
	return python.Object{"request_id", f.call.id, "model", f.call.model, "created", f.call.created, "choices", choices}
}

func (f *generateFormat) begin() {}

func (f *generateFormat) step(s core.Step) {
	ids := []int32{}
	if s.HasOne {
		ids = append(ids, s.Token)
	}
	f.call.sse.json(f.chunk(python.Object{"index", s.Index, "token_ids", ids, "logprobs", nil,
		"finish_reason", reasonOrNull(s.Reason), "stop_reason", s.Stop}))
}

func (f *generateFormat) end(outs []*core.Outcome) { f.call.close(f.chunk(), outs, false) }
