// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"slices"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// demand is what a request wants a response to be held to: calls of tools, or JSON of a schema. A client that leaves
// the choice of a tool to the model (tool_choice "auto") gets text: the toy model never chooses one.
type demand struct {
	tools  []string // called in this order, once each
	named  bool     // by the client, and not just "required"
	guided []slot   // nil: text without a form
}

// endOfCall is the token between two calls. It has no text.
const endOfCall = core.TokenIMEnd

// tooling has the members by which chats, messages and responses name tools.
type tooling struct {
	Tools      []json.RawMessage `json:"tools"`
	ToolChoice json.RawMessage   `json:"tool_choice"`
	Parallel   *bool             `json:"parallel_tool_calls"`
}

// chosen reads the tools and tool_choice of any API. vLLM's model may call several tools for "required"; the toy model
// calls all, unless the client refuses parallel calls.
func chosen(tools []json.RawMessage, choice json.RawMessage, parallel bool) (d demand) {
	c := gjson.ParseBytes(choice)
	kind, want := c.Get("type").String(), ""
	for _, path := range []string{"function.name", "name"} { // chat; the others
		if n := c.Get(path); n.Exists() {
			want = n.String()
		}
	}
	if d.named = want != ""; !d.named && c.String() != "required" && kind != "any" {
		return demand{}
	}
	for _, raw := range tools {
		tool := gjson.ParseBytes(raw)
		if f := tool.Get("function"); f.Exists() {
			tool = f
		}
		name, schema := tool.Get("name").String(), tool.Get("parameters")
		if s := tool.Get("input_schema"); s.Exists() {
			schema = s
		}
		if d.named && name != want || len(d.tools) > 0 && !parallel {
			continue
		}
		if len(d.tools) > 0 {
			d.guided = append(d.guided, slot{tokens: []int32{endOfCall}})
		}
		d.tools = append(d.tools, name)
		d.guided = append(d.guided, guideOf(schema.Raw)...)
	}
	return d
}

// formatted reads a response_format, or what the other APIs have in its place.
func formatted(format json.RawMessage) demand {
	f := gjson.ParseBytes(format)
	switch f.Get("type").String() {
	case "json_object":
		return demand{guided: guideOf("")}
	case "json_schema":
		schema := f.Get("json_schema.schema") // chat
		if !schema.Exists() {
			schema = f.Get("schema")
		}
		return demand{guided: guideOf(schema.Raw)}
	}
	return demand{}
}

// toolCall is a call as a response has it.
type toolCall struct {
	ID, Name, Arguments string
}

// calls splits what was generated into calls. One that the limit cut is there, too, with the arguments so far.
func (d demand) calls(tokens []int32, id func() string) (calls []toolCall) {
	for _, name := range d.tools {
		end := slices.Index(tokens, endOfCall)
		if end < 0 {
			end = len(tokens)
		}
		calls = append(calls, toolCall{id(), name, core.Detokenise(tokens[:end])})
		if end == len(tokens) {
			break
		}
		tokens = tokens[end+1:]
	}
	return calls
}

// reason is a call's finish_reason in chats: "tool_calls", but "stop" for a tool that the client named (vLLM 0.32,
// entrypoints/openai/chat_completion/serving.py).
func (d demand) reason(reason string) string {
	if len(d.tools) > 0 && !d.named && reason == core.ReasonStop {
		return "tool_calls"
	}
	return reason
}

// chatCalls are the tool_calls of a message, with ids as vLLM's.
func (d demand) chatCalls(tokens []int32) (all []python.Object) {
	for _, c := range d.calls(tokens, chatCallID) {
		all = append(all, python.Object{"id", c.ID, "type", "function",
			"function", python.Object{"name", c.Name, "arguments", c.Arguments}})
	}
	return all
}

func chatCallID() string { return "chatcmpl-tool-" + core.RandomHex(8) }

// calling tells which call a stream is in.
type calling struct {
	at   int
	open bool
}

// take notes a token, and reports whether a call opens with it, and whether one closes.
func (c *calling) take(s core.Step) (opens, closes bool) {
	switch {
	case s.HasOne && s.Token == endOfCall:
		closes, c.open = c.open, false
		c.at++
	case s.Text != "" && !c.open:
		opens, c.open = true, true
	}
	return opens, closes
}

// chatDelta is the delta of a step in a chat's call: of the first one, with the call's id and name.
func (d demand) chatDelta(c *calling, s core.Step) python.Object {
	opens, _ := c.take(s)
	if s.Text == "" {
		return python.Object{}
	}
	function, delta := python.Object{"arguments", s.Text}, python.Object{"index", c.at}
	if opens {
		function = append(python.Object{"name", d.tools[c.at]}, function...)
		delta = append(python.Object{"id", chatCallID(), "type", "function"}, delta...)
	}
	return python.Object{"tool_calls", []python.Object{append(delta, "function", function)}}
}
