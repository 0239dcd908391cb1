// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"encoding/json"
	"net/http"
	"strconv"
)

type completionRequest struct {
	sampling
	Prompt   json.RawMessage `json:"prompt"`
	Echo     bool            `json:"echo"`
	Logprobs *int            `json:"logprobs"`
}

// parseCompletion reads a /v1/completions request. max_completion_tokens is not
// known there, and ignored (capture 06).
func parseCompletion(_ *target, r *http.Request, body []byte) (*call, *apiError) {
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
		c.add(&q.sampling, id+"-"+strconv.Itoa(i), prompt, q.Echo && q.Logprobs != nil)
	}
	c.format = &completionFormat{call: c, q: &q, id: id}
	return c, nil
}

// completionPrompts reads a prompt: text, texts, token ids, or lists of these.
func completionPrompts(raw json.RawMessage) ([][]int32, *apiError) {
	var text string
	var texts []string
	var tokens []int32
	var lists [][]int32
	empty := badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty.")
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return nil, empty
	case json.Unmarshal(raw, &text) == nil:
		return [][]int32{tokenise(text)}, nil
	case json.Unmarshal(raw, &texts) == nil:
		if len(texts) == 0 {
			return nil, empty
		}
		for _, text := range texts {
			lists = append(lists, tokenise(text))
		}
		return lists, nil
	case json.Unmarshal(raw, &tokens) == nil:
		return [][]int32{tokens}, nil
	case json.Unmarshal(raw, &lists) == nil:
		return lists, nil
	}
	return nil, badField("prompt", "string_type", "Input should be a valid string", "'<prompt>'")
}

// completionFormat writes completions, whole and streamed.
type completionFormat struct {
	call *call
	q    *completionRequest
	id   string
	sse  *sse

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

func (f *completionFormat) whole(outs []*outcome) any {
	c := f.call
	b := &completionBody{
		ID: f.id, Object: "text_completion", Created: c.created, Model: c.model, Fingerprint: fingerprint,
		Usage: usageOf(c, outs, false), KVParams: outs[0].params,
	}
	for i, o := range outs {
		g := c.gens[i]
		choice := completionChoice{Index: i, Text: o.text, FinishReason: &o.reason, StopReason: o.stop}
		if f.q.ReturnTokens {
			choice.TokenIDs, choice.PromptTokenIDs = o.tokens, g.prompt
		}
		logged := o.tokens
		if f.q.Echo {
			choice.Text = detokenise(g.prompt) + o.text
			logged = append(append([]int32{}, g.prompt...), o.tokens...)
		}
		if f.q.Logprobs != nil {
			choice.Logprobs = completionLogprobs(logged, 0, f.q.Echo)
		}
		if f.q.PromptLogs != nil {
			choice.PromptLogprobs = promptLogprobs(g.prompt)
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
}

func (f *completionFormat) chunk() *completionChunk {
	return &completionChunk{ID: f.id, Object: "text_completion", Created: f.call.created, Model: f.call.model, Choices: []completionChunkChoice{}}
}

func (f *completionFormat) begin(s *sse) { f.sse, f.seen = s, make([]int, len(f.call.gens)) }

func (f *completionFormat) step(s step) {
	g := f.call.gens[s.index]
	choice := completionChunkChoice{Index: s.index, Text: s.text, StopReason: s.stop}
	if s.reason != "" {
		choice.FinishReason = &s.reason
	}
	if f.seen[s.index] == 0 {
		if f.q.Echo {
			choice.Text = detokenise(g.prompt) + choice.Text
		}
		if f.q.ReturnTokens {
			choice.PromptTokenIDs = g.prompt
		}
	}
	if s.hasOne {
		if f.q.ReturnTokens {
			choice.TokenIDs = []int32{s.token}
		}
		if f.q.Logprobs != nil {
			choice.Logprobs = completionLogprobs([]int32{s.token}, f.seen[s.index], false)
		}
		f.seen[s.index]++
		f.total++
	}
	chunk := f.chunk()
	chunk.Choices = append(chunk.Choices, choice)
	if s.reason != "" && !f.call.wantsUsage() {
		chunk.Fingerprint = fingerprint
	}
	if f.call.options != nil && f.call.options.ContinuousUsage {
		chunk.Usage = &streamUsage{Prompt: len(g.prompt), Total: len(g.prompt) + f.seen[s.index], Completion: f.seen[s.index]}
	}
	f.sse.data(encode(chunk))
}

func (f *completionFormat) end(outs []*outcome) {
	if f.call.wantsUsage() {
		chunk := f.chunk()
		chunk.Usage, chunk.Fingerprint = streamUsageOf(f.call, outs, false), fingerprint
		f.sse.data(encode(chunk))
	}
	f.sse.data([]byte("[DONE]"))
}
