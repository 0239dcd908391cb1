// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"net/http"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

type messagesRequest struct {
	sampling
	Messages      []chatMessage `json:"messages"`
	System        *chatContent  `json:"system"`
	StopSequences []string      `json:"stop_sequences"`

	Tools      []json.RawMessage `json:"tools"`
	ToolChoice json.RawMessage   `json:"tool_choice"`
	Output     struct {
		Format json.RawMessage `json:"format"`
	} `json:"output_config"`
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
	prompt := render(messages, q.Tools, true)
	if ids, ok := promptTokens(c.Params); ok {
		prompt = ids
	}
	id := "chatcmpl-" + requestName(r, q.RequestID)
	c.add(&q.sampling, id, prompt, false)
	var choice struct {
		OneAtATime bool `json:"disable_parallel_tool_use"`
	}
	_ = json.Unmarshal(q.ToolChoice, &choice) // without it, calls are parallel
	d := chosen(q.Tools, q.ToolChoice, !choice.OneAtATime).orElse(formatted(q.Output.Format))
	c.guide(d)
	c.format = &messagesFormat{call: c, id: id, demand: d}
	return c, nil
}

type messagesFormat struct {
	call   *Call
	id     string
	demand demand
	sse    *SSE
	within calling

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

type messagesCall struct {
	Type  string          `json:"type"`
	ID    string          `json:"id"`
	Name  string          `json:"name"`
	Input json.RawMessage `json:"input"`
}

type messagesBody struct {
	ID         string        `json:"id"`
	Type       string        `json:"type"`
	Role       string        `json:"role"`
	Content    []any         `json:"content"` // messagesText and messagesCall
	Model      string        `json:"model"`
	StopReason string        `json:"stop_reason,omitempty"`
	Usage      messagesUsage `json:"usage"`
	KVParams   any           `json:"kv_transfer_params,omitempty"`
}

var messagesReasons = map[string]string{core.ReasonLength: "max_tokens", core.ReasonStop: "end_turn",
	"tool_calls": "tool_use"}

func (f *messagesFormat) body() *messagesBody {
	return &messagesBody{ID: f.id, Type: "message", Role: "assistant", Content: []any{}, Model: f.call.model}
}

// used counts as that API does: what the cache gave or took is not input.
func (f *messagesFormat) used(o *core.Outcome) messagesUsage {
	return messagesUsage{Input: len(f.call.Gens[0].Prompt) - o.Cached - o.Created, Output: len(o.Tokens),
		Created: o.Created, Read: o.Cached}
}

func (f *messagesFormat) Whole(outs []*core.Outcome) any {
	o, b := outs[0], f.body()
	for _, call := range f.demand.calls(o.Tokens, chatCallID) {
		input := json.RawMessage(call.Arguments)
		if !json.Valid(input) { // cut by the limit
			input = json.RawMessage("{}")
		}
		b.Content = append(b.Content, messagesCall{"tool_use", call.ID, call.Name, input})
	}
	if f.demand.tools == nil {
		b.Content = append(b.Content, messagesText{"text", o.Text})
	}
	b.StopReason, b.Usage, b.KVParams = f.reason(o.Reason), f.used(o), o.Params
	return b
}

func (f *messagesFormat) reason(reason string) string {
	reason = f.demand.reason(reason)
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
	if f.demand.tools != nil {
		f.callStep(s)
		return
	}
	if !f.within.open {
		f.within.open = true
		f.send("content_block_start", map[string]any{"index": 0, "content_block": messagesText{Type: "text"}})
	}
	if s.Text != "" {
		f.send("content_block_delta", map[string]any{"index": 0, "delta": messagesText{"text_delta", s.Text}})
	}
}

// callStep writes a token of a tool's call.
func (f *messagesFormat) callStep(s core.Step) {
	at := f.within.at
	opens, closes := f.within.take(s)
	if opens {
		f.send("content_block_start", map[string]any{"index": at, "content_block": messagesCall{"tool_use",
			chatCallID(), f.demand.tools[at], json.RawMessage("{}")}})
	}
	if s.Text != "" {
		f.send("content_block_delta", map[string]any{"index": at,
			"delta": map[string]string{"type": "input_json_delta", "partial_json": s.Text}})
	}
	if closes {
		f.send("content_block_stop", map[string]any{"index": at})
	}
}

func (f *messagesFormat) End(outs []*core.Outcome) {
	o := outs[0]
	f.send("content_block_stop", map[string]any{"index": f.within.at})
	f.send("message_delta", map[string]any{"delta": map[string]string{"stop_reason": f.reason(o.Reason)},
		"usage": f.used(o)})
	f.send("message_stop", map[string]any{})
	if !f.undone {
		f.sse.data([]byte("[DONE]"))
	}
}
