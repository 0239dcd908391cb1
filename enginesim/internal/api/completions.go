// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

type completionRequest struct {
	sampling
	Prompt   json.RawMessage `json:"prompt"`
	Echo     flag            `json:"echo"`
	Logprobs *whole          `json:"logprobs"`
}

// ParseCompletion reads a /v1/completions request. max_completion_tokens is not known there, and ignored
// (docs/protocols/nixl.md, recording 06).
func ParseCompletion(e *Engine, r *http.Request, body []byte) (*Call, *Error) {
	var q completionRequest
	c, bad := decodeCall(body, &q, &q.sampling)
	if bad != nil {
		return nil, bad
	}
	prompts, bad := completionPrompts(q.Prompt)
	if bad != nil {
		return nil, bad
	}
	c.defaultLimit = 16
	id := "cmpl-" + requestName(r, q.RequestID)
	for i, prompt := range prompts {
		c.add(&q.sampling, id+"-"+strconv.Itoa(i), prompt, bool(q.Echo) && q.Logprobs != nil)
	}
	c.streamParams = e.StreamParams
	c.format = &completionFormat{call: c, q: &q, id: id}
	return c, nil
}

// completionPrompts reads a prompt: text, texts, token ids, or lists of these.
func completionPrompts(raw json.RawMessage) ([][]int32, *Error) {
	var text string
	var texts []string
	var tokens []int32
	var lists [][]int32
	empty := BadRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return nil, empty
	case json.Unmarshal(raw, &text) == nil:
		return [][]int32{core.Tokenise(text)}, nil
	case json.Unmarshal(raw, &texts) == nil:
		if len(texts) == 0 {
			return nil, empty
		}
		for _, text := range texts {
			lists = append(lists, core.Tokenise(text))
		}
		return lists, nil
	case json.Unmarshal(raw, &tokens) == nil:
		return [][]int32{tokens}, nil
	case json.Unmarshal(raw, &lists) == nil:
		return lists, nil
	}
	return nil, BadField("prompt", "string_type", "Input should be a valid string", "'<prompt>'")
}

// completionFormat writes completions, whole and streamed.
type completionFormat struct {
	call *Call
	q    *completionRequest
	id   string
	sse  *SSE

	seen  []int // tokens per choice
	total int
}

type completionChoice struct {
	Index          int     `json:"index"`
	Text           string  `json:"text"`
	Logprobs       any     `json:"logprobs"`
	FinishReason   *string `json:"finish_reason"`
	StopReason     any     `json:"stop_reason"`
	TokenIDs       []int32 `json:"token_ids"`
	PromptLogprobs any     `json:"prompt_logprobs"`
	PromptTokenIDs []int32 `json:"prompt_token_ids"`
	RoutedExperts  any     `json:"routed_experts"`
}

type completionBody struct {
	ID          string             `json:"id"`
	Object      string             `json:"object"`
	Created     int64              `json:"created"`
	Model       string             `json:"model"`
	Choices     []completionChoice `json:"choices"`
	ServiceTier any                `json:"service_tier"`
	Fingerprint string             `json:"system_fingerprint"`
	Usage       *usage             `json:"usage"`
	KVParams    any                `json:"kv_transfer_params"`
	ECParams    any                `json:"ec_transfer_params"`
	Metrics     any                `json:"metrics"`
}

func (f *completionFormat) Whole(outs []*core.Outcome) any {
	c := f.call
	b := &completionBody{
		ID: f.id, Object: "text_completion", Created: c.created, Model: c.model, Fingerprint: fingerprint,
		Usage: usageOf(c, outs, false), KVParams: outs[0].Params,
	}
	for i, o := range outs {
		g := c.Gens[i]
		choice := completionChoice{Index: i, Text: o.Text, FinishReason: &o.Reason, StopReason: o.Stop}
		if f.q.ReturnTokens {
			choice.TokenIDs, choice.PromptTokenIDs = o.Tokens, g.Prompt
		}
		logged := o.Tokens
		if f.q.Echo {
			choice.Text = core.Detokenise(g.Prompt) + o.Text
			logged = append(append([]int32{}, g.Prompt...), o.Tokens...)
		}
		if f.q.Logprobs != nil {
			choice.Logprobs = completionLogprobs(logged, 0, bool(f.q.Echo))
		}
		if f.q.PromptLogs != nil {
			choice.PromptLogprobs = promptLogprobs(g.Prompt)
		}
		b.Choices = append(b.Choices, choice)
	}
	return b
}

type completionChunkChoice struct {
	Index          int     `json:"index"`
	Text           string  `json:"text"`
	Logprobs       any     `json:"logprobs"`
	FinishReason   *string `json:"finish_reason"`
	StopReason     any     `json:"stop_reason"`
	PromptTokenIDs []int32 `json:"prompt_token_ids"`
	TokenIDs       []int32 `json:"token_ids"`
}

type completionChunk struct {
	ID          string                  `json:"id"`
	Object      string                  `json:"object"`
	Created     int64                   `json:"created"`
	Model       string                  `json:"model"`
	Choices     []completionChunkChoice `json:"choices"`
	Usage       *streamUsage            `json:"usage,omitempty"`
	Fingerprint string                  `json:"system_fingerprint,omitempty"`
	KVParams    any                     `json:"kv_transfer_params,omitempty"`
}

func (f *completionFormat) chunk() *completionChunk {
	return &completionChunk{ID: f.id, Object: "text_completion", Created: f.call.created, Model: f.call.model,
		Choices: []completionChunkChoice{}}
}

func (f *completionFormat) Begin(s *SSE) { f.sse, f.seen = s, make([]int, len(f.call.Gens)) }

func (f *completionFormat) Step(s core.Step) {
	g := f.call.Gens[s.Index]
	choice := completionChunkChoice{Index: s.Index, Text: s.Text, StopReason: s.Stop}
	if s.Reason != "" {
		choice.FinishReason = &s.Reason
	}
	if f.seen[s.Index] == 0 {
		if f.q.Echo {
			choice.Text = core.Detokenise(g.Prompt) + choice.Text
		}
		if f.q.ReturnTokens {
			choice.PromptTokenIDs = g.Prompt
		}
	}
	if s.HasOne {
		if f.q.ReturnTokens {
			choice.TokenIDs = []int32{s.Token}
		}
		if f.q.Logprobs != nil {
			choice.Logprobs = completionLogprobs([]int32{s.Token}, f.seen[s.Index], false)
		}
		f.seen[s.Index]++
		f.total++
	}
	chunk := f.chunk()
	chunk.Choices = append(chunk.Choices, choice)
	chunk.KVParams = f.call.streamed(s)
	if s.Reason != "" && !f.call.wantsUsage() {
		chunk.Fingerprint = fingerprint
	}
	if f.call.options != nil && f.call.options.ContinuousUsage {
		chunk.Usage = &streamUsage{Prompt: len(g.Prompt), Total: len(g.Prompt) + f.seen[s.Index],
			Completion: f.seen[s.Index]}
	}
	f.sse.data(python.Encode(chunk))
}

func (f *completionFormat) End(outs []*core.Outcome) {
	if f.call.wantsUsage() {
		chunk := f.chunk()
		chunk.Usage, chunk.Fingerprint = streamUsageOf(f.call, outs, false), fingerprint
		f.sse.data(python.Encode(chunk))
	}
	f.sse.data([]byte("[DONE]"))
}
