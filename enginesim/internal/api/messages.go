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
	tooling
	Messages      []chatMessage `json:"messages"`
	System        *chatContent  `json:"system"`
	StopSequences []string      `json:"stop_sequences"`
	Output        struct {
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
		return nil, errNoMessages()
	}
	messages := q.Messages
	if q.System != nil {
		messages = append([]chatMessage{{Role: "system", Content: *q.System}}, messages...)
	}
	var choice struct {
		OneAtATime bool `json:"disable_parallel_tool_use"`
	}
	_ = json.Unmarshal(q.ToolChoice, &choice) // without it, calls are parallel
	parallel := !choice.OneAtATime
	q.Parallel = &parallel
	c.id = "chatcmpl-" + requestName(r, q.RequestID)
	c.chat(&q.sampling, &q.tooling, c.id, render(messages, q.Tools, true), q.Output.Format)
	c.format = &messagesFormat{call: c}
	return c, nil
}

type messagesFormat struct {
	call   *Call
	within calling

	undone bool // its stream ends without [DONE]
}

var messagesReasons = map[string]string{core.ReasonLength: "max_tokens", core.ReasonStop: "end_turn",
	"tool_calls": "tool_use"}

// body is a message with some content, and with more members.
func (f *messagesFormat) body(content []python.Object, more ...any) python.Object {
	return append(python.Object{"id", f.call.id, "type", "message", "role", "assistant", "content", content,
		"model", f.call.model}, more...)
}

func messagesUsage(input, output, created, read int) python.Object {
	return python.Object{"input_tokens", input, "output_tokens", output, "cache_creation_input_tokens", created,
		"cache_read_input_tokens", read}
}

// used counts as that API does: what the cache gave or took is not input.
func (f *messagesFormat) used(o *core.Outcome) python.Object {
	return messagesUsage(len(f.call.Gens[0].Prompt)-o.Cached-o.Created, len(o.Tokens), o.Created, o.Cached)
}

func (f *messagesFormat) Whole(outs []*core.Outcome) any {
	o, d := outs[0], f.call.demand
	var content []python.Object
	for _, call := range d.calls(o.Tokens, chatCallID) {
		input := json.RawMessage(call.Arguments)
		if !json.Valid(input) { // cut by the limit
			input = json.RawMessage("{}")
		}
		content = append(content, toolUse(call.ID, call.Name, input))
	}
	if d.tools == nil {
		content = append(content, python.Object{"type", "text", "text", o.Text})
	}
	b := f.body(content)
	if reason := f.reason(o.Reason); reason != nil {
		b = append(b, "stop_reason", reason)
	}
	if b = append(b, "usage", f.used(o)); o.Params != nil {
		b = append(b, "kv_transfer_params", o.Params)
	}
	return b
}

func toolUse(id, name string, input json.RawMessage) python.Object {
	return python.Object{"type", "tool_use", "id", id, "name", name, "input", input}
}

// reason is the stop_reason. vLLM has null for an abort, and no member in a whole response; SGLang has end_turn.
func (f *messagesFormat) reason(reason string) any {
	reason = f.call.demand.reason(reason)
	switch r, ok := messagesReasons[reason]; {
	case ok:
		return r
	case f.undone:
		return "end_turn"
	case reason == "abort", reason == "null":
		return nil
	}
	return reason
}

func (f *messagesFormat) begin() {
	f.call.sse.typed("message_start", map[string]any{"message": f.body(nil, "usage",
		messagesUsage(len(f.call.Gens[0].Prompt), 0, 0, 0))})
}

func (f *messagesFormat) step(s core.Step) {
	sse := f.call.sse
	if f.call.demand.tools != nil {
		f.callStep(s)
		return
	}
	if !f.within.open {
		f.within.open = true
		sse.typed("content_block_start", map[string]any{"index": 0, "content_block": python.Object{"type", "text",
			"text", ""}})
	}
	if s.Text != "" {
		sse.typed("content_block_delta", map[string]any{"index": 0, "delta": python.Object{"type", "text_delta",
			"text", s.Text}})
	}
}

// callStep writes a token of a tool's call.
func (f *messagesFormat) callStep(s core.Step) {
	at, sse := f.within.at, f.call.sse
	opens, closes := f.within.take(s)
	if opens {
		sse.typed("content_block_start", map[string]any{"index": at,
			"content_block": toolUse(chatCallID(), f.call.demand.tools[at], json.RawMessage("{}"))})
	}
	if s.Text != "" {
		sse.typed("content_block_delta", map[string]any{"index": at,
			"delta": map[string]string{"type": "input_json_delta", "partial_json": s.Text}})
	}
	if closes {
		sse.typed("content_block_stop", map[string]any{"index": at})
	}
}

func (f *messagesFormat) end(outs []*core.Outcome) {
	o, sse := outs[0], f.call.sse
	sse.typed("content_block_stop", map[string]any{"index": f.within.at})
	sse.typed("message_delta", map[string]any{"delta": map[string]any{"stop_reason": f.reason(o.Reason)},
		"usage": f.used(o)})
	sse.typed("message_stop", map[string]any{})
	if !f.undone {
		sse.done()
	}
}
