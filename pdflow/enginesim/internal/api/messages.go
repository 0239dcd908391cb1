// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/http"

	"github.com/pdkit/pdkit/pdflow/enginesim/internal/core"
	"github.com/pdkit/pdkit/pdflow/enginesim/internal/python"
)

type messagesRequest struct {
	sampling
	Messages      []chatMessage `json:"messages"`
	System        *chatContent  `json:"system"`
	StopSequences []string      `json:"stop_sequences"`
}

// parseMessages reads a /v1/messages request, which vLLM renders and runs as a chat.
func parseMessages(_ *Engine, r *http.Request, body []byte) (*Call, *Error) {
	var q messagesRequest
	c, bad := decodeCall(body, &q, &q.sampling)
	if bad != nil {
		return nil, bad
	}
	q.Stop, c.N, c.anyOptions = q.StopSequences, 1, true
	switch {
	case !c.limited:
		return nil, BadField("max_tokens", "missing", "Field required", "{}")
	case len(q.Messages) == 0:
		return nil, BadField("messages", "too_short", "List should have at least 1 item after validation", "[]")
	}
	messages := q.Messages
	if q.System != nil {
		messages = append([]chatMessage{{Role: "system", Content: *q.System}}, messages...)
	}
	prompt := render(messages, nil, true)
	if ids, ok := promptTokens(c.Params); ok {
		prompt = ids
	}
	id := "chatcmpl-" + requestName(r, q.RequestID)
	c.add(&q.sampling, id, prompt, false)
	c.format = &messagesFormat{call: c, id: id}
	return c, nil
}

type messagesFormat struct {
	call *Call
	id   string
	sse  *SSE
	open bool

	undone bool // its stream ends without [DONE]
}

type messagesUsage struct {
	Input   int `json:"input_tokens"`
	Output  int `json:"output_tokens"`
	Created int `json:"cache_creation_input_tokens"`
	Read    int `json:"cache_read_input_tokens"`
}

type messagesText struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

type messagesBody struct {
	ID         string         `json:"id"`
	Type       string         `json:"type"`
	Role       string         `json:"role"`
	Content    []messagesText `json:"content"`
	Model      string         `json:"model"`
	StopReason string         `json:"stop_reason,omitempty"`
	Usage      messagesUsage  `json:"usage"`
	KVParams   any            `json:"kv_transfer_params,omitempty"`
}

var messagesReasons = map[string]string{core.ReasonLength: "max_tokens", core.ReasonStop: "end_turn"}

func (f *messagesFormat) body() *messagesBody {
	return &messagesBody{ID: f.id, Type: "message", Role: "assistant", Content: []messagesText{}, Model: f.call.model}
}

// used counts as that API does: what the cache gave or took is not input.
func (f *messagesFormat) used(o *core.Outcome) messagesUsage {
	return messagesUsage{Input: len(f.call.Gens[0].Prompt) - o.Cached - o.Created, Output: len(o.Tokens),
		Created: o.Created, Read: o.Cached}
}

func (f *messagesFormat) Whole(outs []*core.Outcome) any {
	o, b := outs[0], f.body()
	b.Content = append(b.Content, messagesText{"text", o.Text})
	b.StopReason, b.Usage, b.KVParams = messagesReason(o.Reason), f.used(o), o.Params
	return b
}

func messagesReason(reason string) string {
	if r, ok := messagesReasons[reason]; ok {
		return r
	}
	return reason
}

func (f *messagesFormat) send(kind string, fields map[string]any) {
	fields["type"] = kind
	f.sse.named(kind, python.Encode(fields))
}

func (f *messagesFormat) Begin(s *SSE) {
	f.sse = s
	b := f.body()
	b.Usage.Input = len(f.call.Gens[0].Prompt)
	f.send("message_start", map[string]any{"message": b})
}

func (f *messagesFormat) Step(s core.Step) {
	if !f.open {
		f.open = true
		f.send("content_block_start", map[string]any{"index": 0, "content_block": messagesText{Type: "text"}})
	}
	if s.Text != "" {
		f.send("content_block_delta", map[string]any{"index": 0, "delta": messagesText{"text_delta", s.Text}})
	}
}

func (f *messagesFormat) End(outs []*core.Outcome) {
	o := outs[0]
	f.send("content_block_stop", map[string]any{"index": 0})
	f.send("message_delta", map[string]any{"delta": map[string]string{"stop_reason": messagesReason(o.Reason)},
		"usage": f.used(o)})
	f.send("message_stop", map[string]any{})
	if !f.undone {
		f.sse.data([]byte("[DONE]"))
	}
}
