// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"net/http"
	"slices"
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
	c.id, c.streamParams = "cmpl-"+requestName(r, q.RequestID), e.StreamParams
	for i, prompt := range prompts {
		c.add(&q.sampling, c.id+"-"+strconv.Itoa(i), prompt, bool(q.Echo) && q.Logprobs != nil)
	}
	c.format = &completionFormat{call: c, q: &q}
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
}

func (f *completionFormat) Whole(outs []*core.Outcome) any {
	c := f.call
	var choices []python.Object
	for i, o := range outs {
		prompt, text, logged := c.Gens[i].Prompt, o.Text, o.Tokens
		if f.q.Echo {
			text, logged = core.Detokenise(prompt)+o.Text, slices.Concat(prompt, o.Tokens)
		}
		var logs, promptLogs any
		if f.q.Logprobs != nil {
			logs = completionLogprobs(logged, 0, bool(f.q.Echo))
		}
		if f.q.PromptLogs != nil {
			promptLogs = promptLogprobs(prompt)
		}
		choices = append(choices, python.Object{"index", i, "text", text, "logprobs", logs, "finish_reason", o.Reason,
			"stop_reason", o.Stop, "token_ids", when(f.q.ReturnTokens, o.Tokens), "prompt_logprobs", promptLogs,
			"prompt_token_ids", when(f.q.ReturnTokens, prompt), "routed_experts", nil}.With(o.Choice))
	}
	return python.Object{"id", c.id, "object", "text_completion", "created", c.created, "model", c.model,
		"choices", choices, "service_tier", nil, "system_fingerprint", fingerprint,
		"usage", c.usage(outs, false, true), "kv_transfer_params", outs[0].Params, "ec_transfer_params", nil,
		"metrics", nil}.With(outs[0].Members)
}

func (f *completionFormat) chunk(choices ...python.Object) python.Object {
	return f.call.chunk("text_completion", choices)
}

func (f *completionFormat) begin() {}

func (f *completionFormat) step(s core.Step) {
	prompt, text, made := f.call.Gens[s.Index].Prompt, s.Text, f.call.made[s.Index]
	if made == 0 && bool(f.q.Echo) {
		text = core.Detokenise(prompt) + text
	}
	var logs any
	if s.HasOne && f.q.Logprobs != nil {
		logs = completionLogprobs([]int32{s.Token}, made, false)
	}
	f.call.sse.json(f.call.told(f.chunk(python.Object{"index", s.Index, "text", text, "logprobs", logs,
		"finish_reason", reasonOrNull(s.Reason), "stop_reason", s.Stop,
		"prompt_token_ids", when(made == 0 && f.q.ReturnTokens, prompt),
		"token_ids", when(s.HasOne && f.q.ReturnTokens, []int32{s.Token})}), s))
}

func (f *completionFormat) end(outs []*core.Outcome) {
	f.call.close(f.chunk(), outs, false, "system_fingerprint", fingerprint)
}
