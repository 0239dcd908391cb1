// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"net/http"
	"slices"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

type responsesRequest struct {
	sampling
	tooling
	Input           json.RawMessage `json:"input"`
	Instructions    *string         `json:"instructions"`
	MaxOutputTokens *whole          `json:"max_output_tokens"`
	TopP            *float64        `json:"top_p"`
	Metadata        json.RawMessage `json:"metadata"`
	User            *string         `json:"user"`
	Store           *bool           `json:"store"`
	Background      bool            `json:"background"`
	Previous        *string         `json:"previous_response_id"`
	Text            struct {
		Format json.RawMessage `json:"format"`
	} `json:"text"`
}

// parseResponses reads a /v1/responses request. Its ids come from the body alone: the header X-Request-Id is not read
// there.
func parseResponses(e *Engine, _ *http.Request, body []byte) (*Call, *Error) {
	var q responsesRequest
	c, bad := decodeCall(body, &q, &q.sampling)
	if bad != nil {
		return nil, bad
	}
	c.N, c.maxTokens, c.limited, c.limitName = 1, 0, false, "max_output_tokens"
	c.anyOptions = true
	c.limit(q.MaxOutputTokens)
	messages, bad := responsesInput(q.Input)
	if bad != nil {
		return nil, bad
	}
	if messages, bad = q.follow(e.Kept, messages); bad != nil {
		return nil, bad
	}
	if q.Store == nil || *q.Store {
		c.kept = e.Kept
	}
	c.Background = q.Background
	if q.Instructions != nil {
		messages = append([]chatMessage{{Role: "system", Content: chatContent(*q.Instructions)}}, messages...)
	}
	if c.id = q.RequestID; c.id == "" {
		c.id = "resp_" + core.RandomHex(8)
	}
	c.chat(&q.sampling, &q.tooling, c.id+"_0", render(messages, q.Tools, true), q.Text.Format)
	c.format = &responsesFormat{call: c, q: &q, messages: messages, message: "msg_" + core.RandomHex(8)}
	return c, nil
}

// responsesInput reads text, or a list of messages.
func responsesInput(raw json.RawMessage) ([]chatMessage, *Error) {
	var text string
	if json.Unmarshal(raw, &text) == nil && text != "" {
		return []chatMessage{{Role: "user", Content: chatContent(text)}}, nil
	}
	var messages []chatMessage
	if json.Unmarshal(raw, &messages) != nil || len(messages) == 0 {
		return nil, BadField("input", "string_type", "Input should be a valid string", "'<input>'")
	}
	return messages, nil
}

// follow returns the messages behind those of the response that the request names, if it names one.
func (q *responsesRequest) follow(kept *Kept, messages []chatMessage) ([]chatMessage, *Error) {
	switch {
	case q.Background && q.Store != nil && !*q.Store:
		return nil, BadField("", "value_error", "Value error, background can only be used when `store` is true", "{}")
	case q.Background && kept == nil:
		return nil, invalidResponse(http.StatusBadRequest, "background", "This vLLM engine does not support "+
			"`store=True` and therefore does not support the background mode. To enable these features, set the "+
			"environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server.")
	case q.Previous == nil:
		return messages, nil
	}
	before, bad := kept.get(*q.Previous)
	if bad != nil {
		return nil, bad
	}
	kept.mu.Lock()
	defer kept.mu.Unlock()
	said := chatMessage{Role: "assistant", Content: chatContent(before.output)}
	return slices.Concat(before.input, []chatMessage{said}, messages), nil
}

type responsesFormat struct {
	call     *Call
	q        *responsesRequest
	messages []chatMessage
	message  string // its id
	seq      int
	text     string
	within   calling
	made     []responsesCall // in the stream so far
}

type responsesCall struct {
	Arguments string `json:"arguments"`
	CallID    string `json:"call_id"`
	Name      string `json:"name"`
	Type      string `json:"type"`
	ID        string `json:"id"`
	Status    string `json:"status"`
}

// float writes a number as Python does: 0.0, not 0.
func float(v *float64, otherwise float64) json.RawMessage {
	if v == nil {
		v = &otherwise
	}
	return json.RawMessage(python.Number(*v))
}

// body is the response with what is known of it: a status, and at the end the output and the outcome.
func (f *responsesFormat) body(status string, output []any, o *core.Outcome) python.Object {
	c, q := f.call, f.q
	var incomplete, usage, params any
	if o != nil {
		usage, params = f.usage(o), o.Params
		switch o.Reason {
		case core.ReasonStop, "abort": // vLLM calls an abort complete, but for gpt-oss
		case core.ReasonLength:
			status, incomplete = "incomplete", map[string]string{"reason": "max_output_tokens"}
		default:
			status = o.Reason
		}
	}
	tools, choice := q.Tools, any("auto")
	if tools == nil {
		tools, choice = []json.RawMessage{}, "none"
	}
	if len(q.ToolChoice) > 0 {
		choice = q.ToolChoice
	}
	return python.Object{"id", c.id, "created_at", c.created, "incomplete_details", incomplete,
		"instructions", q.Instructions, "metadata", q.Metadata, "model", c.model, "object", "response",
		"output", output, "parallel_tool_calls", true, "temperature", float(q.Temperature, 1), "tool_choice", choice,
		"tools", tools, "top_p", float(q.TopP, 1), "background", q.Background, "max_output_tokens", c.Gens[0].MaxTokens,
		"max_tool_calls", nil, "previous_response_id", q.Previous, "prompt", nil, "reasoning", nil,
		"service_tier", "auto", "status", status, "text", nil, "top_logprobs", nil, "truncation", "disabled",
		"usage", usage, "user", q.User,
		"presence_penalty", float(nil, 0), "frequency_penalty", float(nil, 0), "kv_transfer_params", params,
		"ec_transfer_params", nil, "input_messages", nil, "output_messages", nil}
}

func (f *responsesFormat) usage(o *core.Outcome) python.Object {
	input, output := len(f.call.Gens[0].Prompt), len(o.Tokens)
	return python.Object{"input_tokens", input,
		"input_tokens_details", python.Object{"cached_tokens", o.Cached, "cache_write_tokens", o.Created,
			"input_tokens_per_turn", []int{}, "cached_tokens_per_turn", []int{}},
		"output_tokens", output,
		"output_tokens_details", python.Object{"reasoning_tokens", 0, "tool_output_tokens", 0,
			"output_tokens_per_turn", []int{}, "tool_output_tokens_per_turn", []int{}},
		"total_tokens", input + output}
}

// item is a message with its parts.
func (f *responsesFormat) item(status string, content ...python.Object) python.Object {
	return python.Object{"id", f.message, "content", content, "role", "assistant", "status", status,
		"type", "message", "phase", nil}
}

func (f *responsesFormat) itemOf(text string) python.Object {
	return f.item("completed", python.Object{"annotations", []any{}, "text", text, "type", "output_text",
		"logprobs", nil})
}

func (f *responsesFormat) Whole(outs []*core.Outcome) any {
	o, d := outs[0], f.call.demand
	calls := f.made
	if calls == nil {
		for _, c := range d.calls(o.Tokens, responsesCallID) {
			calls = append(calls, f.called(c, "completed"))
		}
	}
	output := make([]any, 0, 1)
	for _, c := range calls {
		output = append(output, c)
	}
	if d.tools == nil {
		output = append(output, f.itemOf(o.Text))
	}
	b := f.body("completed", output, o)
	if o.Reason == failed { // as SGLang writes it
		b = append(b, "error", python.Object{"code", "server_error", "message", "Generation aborted"})
	}
	f.call.kept.keep(f, b, o)
	return b
}

// failed is a status, and a part of an event's name.
const failed = "failed"

// send writes one typed event with its number.
func (f *responsesFormat) send(kind string, fields map[string]any) {
	fields["sequence_number"] = f.seq
	f.seq++
	f.call.sse.typed(kind, fields)
}

func (f *responsesFormat) begin() {
	for _, kind := range []string{"response.created", "response.in_progress"} {
		f.send(kind, map[string]any{"response": f.body("in_progress", []any{}, nil)})
	}
}

func (f *responsesFormat) part(text string) map[string]any {
	return map[string]any{"annotations": []any{}, "text": text, "type": "output_text", "logprobs": []any{}}
}

func (f *responsesFormat) at(fields map[string]any) map[string]any {
	fields["item_id"], fields["output_index"], fields["content_index"] = f.message, 0, 0
	return fields
}

func (f *responsesFormat) step(s core.Step) {
	if f.call.demand.tools != nil {
		f.callStep(s)
		return
	}
	if f.seq == 2 {
		f.send("response.output_item.added", map[string]any{"output_index": 0, "item": f.item("in_progress")})
		f.send("response.content_part.added", f.at(map[string]any{"part": f.part("")}))
	}
	if s.Text != "" {
		f.text += s.Text
		f.send("response.output_text.delta", f.at(map[string]any{"delta": s.Text, "logprobs": []any{}}))
	}
}

func responsesCallID() string { return "call_" + core.RandomHex(8) }

func (f *responsesFormat) called(c toolCall, status string) responsesCall {
	return responsesCall{Arguments: c.Arguments, CallID: c.ID, Name: c.Name, Type: "function_call",
		ID: "fc_" + core.RandomHex(8), Status: status}
}

// callStep writes a token of a tool's call.
func (f *responsesFormat) callStep(s core.Step) {
	at := f.within.at
	opens, closes := f.within.take(s)
	if opens {
		c := f.called(toolCall{ID: responsesCallID(), Name: f.call.demand.tools[at]}, "in_progress")
		f.made = append(f.made, c)
		f.send("response.output_item.added", map[string]any{"output_index": at, "item": c})
	}
	if s.Text != "" {
		f.made[at].Arguments += s.Text
		f.send("response.function_call_arguments.delta", map[string]any{"output_index": at, "item_id": f.made[at].ID,
			"delta": s.Text})
	}
	if closes || s.Reason != "" && f.within.open {
		f.made[at].Status = "completed"
		f.send("response.function_call_arguments.done", map[string]any{"output_index": at, "item_id": f.made[at].ID,
			"name": f.made[at].Name, "arguments": f.made[at].Arguments})
		f.send("response.output_item.done", map[string]any{"output_index": at, "item": f.made[at]})
	}
}

func (f *responsesFormat) end(outs []*core.Outcome) {
	if f.call.demand.tools == nil {
		f.send("response.output_text.done", f.at(map[string]any{"text": f.text, "logprobs": []any{}}))
		f.send("response.content_part.done", f.at(map[string]any{"part": f.part(f.text)}))
		f.send("response.output_item.done", map[string]any{"output_index": 0, "item": f.itemOf(f.text)})
	}
	kind := "response.completed"
	if outs[0].Reason == failed {
		kind = "response." + failed
	}
	f.send(kind, map[string]any{"response": f.Whole(outs)})
}
