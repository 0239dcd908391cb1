// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// sglangRequest is SGLang's own API, as far as a proxy could notice.
type sglangRequest struct {
	RID       oneOrMany       `json:"rid"`
	Text      oneOrMany       `json:"text"`
	InputIDs  json.RawMessage `json:"input_ids"`
	Stream    bool            `json:"stream"`
	Logprob   json.RawMessage `json:"return_logprob"`
	LogFrom   *int            `json:"logprob_start_len"`
	Sampling  sglangSampling  `json:"sampling_params"`
	batch     bool
	returning bool
}

type sglangSampling struct {
	MaxTokens   *int      `json:"max_new_tokens"`
	MinTokens   int       `json:"min_new_tokens"`
	N           *int      `json:"n"`
	Temperature *float64  `json:"temperature"`
	Seed        *uint64   `json:"sampling_seed"`
	Stop        oneOrMany `json:"stop"`
	StopIDs     []int32   `json:"stop_token_ids"`
}

// ParseSGLang reads a /generate request. remote says that the prompt is computed by another engine.
func ParseSGLang(remote bool, body []byte) (*Call, *Error) {
	var q sglangRequest
	if bad := DecodeBody(body, &q); bad != nil {
		return nil, bad
	}
	var members struct {
		Text json.RawMessage `json:"text"`
	}
	_ = json.Unmarshal(body, &members) // it has just been read
	var prompts [][]int32
	if len(q.InputIDs) > 0 && string(q.InputIDs) != "null" {
		var bad *Error
		if prompts, bad = completionPrompts(q.InputIDs); bad != nil {
			return nil, bad
		}
		q.batch = strings.HasPrefix(strings.ReplaceAll(string(q.InputIDs), " ", ""), "[[")
	} else {
		for _, text := range q.Text {
			prompts = append(prompts, core.Tokenise(text))
		}
		q.batch = len(members.Text) > 0 && members.Text[0] == '['
	}
	if len(prompts) == 0 {
		return nil, BadRequest("text", "Either text, input_ids or input_embeds should be provided.")
	}
	s := &sampling{
		Stream: q.Stream, MaxTokens: (*whole)(q.Sampling.MaxTokens), MinTokens: whole(q.Sampling.MinTokens),
		N:    (*whole)(q.Sampling.N),
		Seed: q.Sampling.Seed, Stop: q.Sampling.Stop, StopTokenIDs: q.Sampling.StopIDs,
	}
	c, bad := newCall(s)
	if bad != nil {
		return nil, bad
	}
	c.limitName, c.defaultLimit = "max_new_tokens", 128
	c.greedy = c.N == 1 && q.Sampling.Temperature != nil && *q.Sampling.Temperature == 0
	for i, prompt := range prompts {
		id := core.RandomHex(8)
		if i < len(q.RID) {
			id = q.RID[i]
		}
		c.add(s, id, prompt, false)
	}
	q.batch = q.batch || c.N > 1
	q.returning = strings.Contains(string(q.Logprob), "true")
	c.format = &sglangFormat{call: c, q: &q, prefilled: remote, begun: time.Now()}
	return c, nil
}

// ParseSGLangResponses reads a /v1/responses request as SGLang does: it takes two tokens off the limit, and refuses
// what is below zero then (0.5.23, entrypoints/openai/protocol.py, ResponsesRequest.to_sampling_params).
func ParseSGLangResponses(e *Engine, r *http.Request, body []byte) (*Call, *Error) {
	c, bad := parseResponses(e, r, body)
	if bad != nil || !c.limited {
		return c, bad
	}
	if c.maxTokens -= 2; c.maxTokens < 0 {
		return nil, BadRequest("", "max_new_tokens must be at least 0, got %d.", c.maxTokens)
	}
	return c, nil
}

// ParseSGLangMessages reads a /v1/messages request. SGLang's streams of this API have no [DONE].
func ParseSGLangMessages(e *Engine, r *http.Request, body []byte) (*Call, *Error) {
	c, bad := parseMessages(e, r, body)
	if bad == nil {
		c.format.(*messagesFormat).undone = true //nolint:errcheck // parseMessages makes nothing else
	}
	return c, bad
}

// AnthropicErrors wraps an API whose refusals have the shape of Anthropic's.
func AnthropicErrors(parse Parser) Parser {
	return func(e *Engine, r *http.Request, body []byte) (*Call, *Error) {
		c, bad := parse(e, r, body)
		if bad != nil {
			bad.anthropic = true
		}
		return c, bad
	}
}

// sglangFormat writes responses of /generate. A stream's text is all so far.
type sglangFormat struct {
	call      *Call
	q         *sglangRequest
	prefilled bool // the prompt is computed elsewhere, so nothing is known of its log probabilities
	begun     time.Time

	texts  []string
	tokens [][]int32
}

// response is one sequence's part; before and after are members at the beginning, and at the end of meta_info.
func (f *sglangFormat) response(before python.Object, i int, text string, tokens []int32, cached int, reason string,
	stop any, after ...any) python.Object {
	g := f.call.Gens[i]
	var finish any
	switch reason {
	case "":
	case core.ReasonStop:
		finish = map[string]any{"type": "stop", "matched": stop}
	case core.ReasonLength:
		finish = map[string]any{"type": "length", "length": len(tokens)}
	default:
		finish = map[string]any{"type": reason, "message": "Abort in waiting queue",
			"status_code": http.StatusInternalServerError}
	}
	meta := python.Object{"id", g.Name, "finish_reason", finish, "prompt_tokens", len(g.Prompt)}
	if f.q.returning {
		output := []any{}
		for at, t := range tokens {
			output = append(output, []any{logprob(t, at), t, nil})
		}
		meta = append(meta, "input_token_logprobs", f.input(g.Prompt), "output_token_logprobs", output)
	}
	meta = append(append(meta, "completion_tokens", len(tokens), "cached_tokens", cached), after...)
	return append(before, "text", text, "output_ids", append([]int32{}, tokens...), "meta_info", meta)
}

// input are the log probabilities of the prompt from logprob_start_len on; the very first token has none.
func (f *sglangFormat) input(prompt []int32) []any {
	logs := []any{}
	if f.prefilled || f.q.LogFrom == nil || *f.q.LogFrom < 0 {
		return logs
	}
	for at := *f.q.LogFrom; at < len(prompt); at++ {
		var p any
		if at > 0 {
			p = logprob(prompt[at], at)
		}
		logs = append(logs, []any{p, prompt[at], nil})
	}
	return logs
}

func (f *sglangFormat) Whole(outs []*core.Outcome) any {
	list := make([]python.Object, len(outs))
	for i, o := range outs {
		list[i] = f.response(nil, i, o.Text, o.Tokens, o.Cached, o.Reason, o.Stop,
			"e2e_latency", time.Since(f.begun).Seconds())
	}
	if !f.q.batch {
		return list[0]
	}
	return list
}

func (f *sglangFormat) begin() {
	f.texts, f.tokens = make([]string, len(f.call.Gens)), make([][]int32, len(f.call.Gens))
}

func (f *sglangFormat) step(s core.Step) {
	i := s.Index
	f.texts[i] += s.Text
	if s.HasOne {
		f.tokens[i] = append(f.tokens[i], s.Token)
	}
	var index python.Object
	if f.q.batch {
		index = python.Object{"index", i}
	}
	f.call.sse.json(f.response(index, i, f.texts[i], f.tokens[i], 0, s.Reason, s.Stop))
}

func (f *sglangFormat) end([]*core.Outcome) { f.call.sse.done() }
