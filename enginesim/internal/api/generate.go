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
	id := "generate-tokens-" + requestName(r, q.RequestID)
	c.add(&s, id, q.TokenIDs, false)
	c.format = &generateFormat{call: c, q: &q, id: id}
	return c, nil
}

type generateFormat struct {
	call *Call
	q    *generateRequest
	id   string
	sse  *SSE
}

type weightVersion struct {
	Version string `json:"version"`
	Start   int    `json:"start"`
	End     int    `json:"end"`
}

type generateChoice struct {
	Index         int             `json:"index"`
	FinishReason  *string         `json:"finish_reason"`
	StopReason    any             `json:"stop_reason"`
	TokenIDs      []int32         `json:"token_ids"`
	RoutedExperts any             `json:"routed_experts"`
	SamplingMask  any             `json:"sampling_mask"`
	Weights       []weightVersion `json:"weight_versions"`
	Logprobs      any             `json:"logprobs"`
}

type generateBody struct {
	RequestID      string           `json:"request_id"`
	Model          string           `json:"model"`
	Created        int64            `json:"created"`
	Usage          *usage           `json:"usage"`
	PromptLogprobs any              `json:"prompt_logprobs"`
	PromptIDLogs   any              `json:"prompt_token_id_logprobs"`
	PromptTokenIDs []int32          `json:"prompt_token_ids"`
	Placeholders   any              `json:"mm_placeholders"`
	Metrics        any              `json:"metrics"`
	KVParams       any              `json:"kv_transfer_params"`
	ECParams       any              `json:"ec_transfer_params"`
	OutputMode     string           `json:"output_mode"`
	Choices        []generateChoice `json:"choices"`
}

func (f *generateFormat) Whole(outs []*core.Outcome) any {
	c := f.call
	b := &generateBody{RequestID: f.id, Model: c.model, Created: c.created, Usage: usageOf(c, outs, false),
		KVParams: outs[0].Params, OutputMode: "tokens"}
	if f.q.ReturnTokens {
		b.PromptTokenIDs = c.Gens[0].Prompt
	}
	for i, o := range outs {
		b.Choices = append(b.Choices, generateChoice{
			Index: i, FinishReason: &o.Reason, StopReason: o.Stop, TokenIDs: o.Tokens,
			Weights: []weightVersion{{"default", 0, len(o.Tokens)}},
		})
	}
	return b
}

type generateChunkChoice struct {
	Index        int     `json:"index"`
	TokenIDs     []int32 `json:"token_ids"`
	Logprobs     any     `json:"logprobs"`
	FinishReason *string `json:"finish_reason"`
	StopReason   any     `json:"stop_reason"`
}

type generateChunk struct {
	RequestID string                `json:"request_id"`
	Model     string                `json:"model"`
	Created   int64                 `json:"created"`
	Choices   []generateChunkChoice `json:"choices"`
	Usage     *streamUsage          `json:"usage,omitempty"`
}

func (f *generateFormat) chunk() *generateChunk {
	return &generateChunk{RequestID: f.id, Model: f.call.model, Created: f.call.created,
		Choices: []generateChunkChoice{}}
}

func (f *generateFormat) Begin(s *SSE) { f.sse = s }

func (f *generateFormat) Step(s core.Step) {
	choice := generateChunkChoice{Index: s.Index, TokenIDs: []int32{}, StopReason: s.Stop}
	if s.HasOne {
		choice.TokenIDs = append(choice.TokenIDs, s.Token)
	}
	if s.Reason != "" {
		choice.FinishReason = &s.Reason
	}
	chunk := f.chunk()
	chunk.Choices = append(chunk.Choices, choice)
	f.sse.data(python.Encode(chunk))
}

func (f *generateFormat) End(outs []*core.Outcome) {
	if f.call.wantsUsage() {
		chunk := f.chunk()
		chunk.Usage = streamUsageOf(f.call, outs, false)
		f.sse.data(python.Encode(chunk))
	}
	f.sse.data([]byte("[DONE]"))
}
