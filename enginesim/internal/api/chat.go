// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"encoding/json"
	"net/http"
	"slices"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

type chatRequest struct {
	sampling
	tooling
	Messages            []chatMessage   `json:"messages"`
	MaxCompletionTokens *whole          `json:"max_completion_tokens"`
	NoPromptEnd         *bool           `json:"add_generation_prompt"`
	Logprobs            flag            `json:"logprobs"`
	TopLogprobs         whole           `json:"top_logprobs"`
	Format              json.RawMessage `json:"response_format"`
}

type chatMessage struct {
	Role    string      `json:"role"`
	Content chatContent `json:"content"`
}

// chatContent is the text of a string, of a list of parts, or of null. Media stand in it by their hashes.
type chatContent string

func (c *chatContent) UnmarshalJSON(data []byte) error {
	var text string
	if len(data) == 0 || data[0] != '[' {
		err := json.Unmarshal(data, &text)
		*c = chatContent(text)
		return err
	}
	var parts []json.RawMessage
	if err := json.Unmarshal(data, &parts); err != nil {
		return err
	}
	for _, part := range parts {
		var p struct {
			Text string `json:"text"`
		}
		if err := json.Unmarshal(part, &p); err != nil {
			return err
		}
		text += p.Text + mediaText(part)
	}
	*c = chatContent(text)
	return nil
}

// render is the tiny model's chat template: markers around each message.
func render(messages []chatMessage, tools []json.RawMessage, open bool) []int32 {
	size := 0
	for _, m := range messages {
		size += len(m.Role) + len(m.Content) + 4
	}
	tokens := make([]int32, 0, size+16)
	if len(tools) > 0 {
		tokens = core.AppendText(append(tokens, core.TokenIMStart), "tools\n")
		var b bytes.Buffer
		if json.Compact(&b, python.Encode(tools)) == nil {
			tokens = core.AppendText(tokens, b.String())
		}
		tokens = core.AppendText(append(tokens, core.TokenIMEnd), "\n")
	}
	for _, m := range messages {
		tokens = core.AppendText(append(tokens, core.TokenIMStart), m.Role+"\n")
		tokens = core.AppendText(tokens, string(m.Content))
		tokens = core.AppendText(append(tokens, core.TokenIMEnd), "\n")
	}
	if open {
		tokens = core.AppendText(append(tokens, core.TokenIMStart), "assistant\n")
	}
	return tokens
}

// ParseChat reads a /v1/chat/completions request. max_completion_tokens wins over max_tokens (docs/protocols/nixl.md,
// recording 06); kv_transfer_params.prompt_token_ids is taken for the prompt, whatever the messages say
// (docs/protocols/nixl.md, recording 02b).
func ParseChat(e *Engine, r *http.Request, body []byte) (*Call, *Error) {
	var q chatRequest
	c, bad := decodeCall(body, &q, &q.sampling)
	if bad != nil {
		return nil, bad
	}
	if q.MaxCompletionTokens != nil {
		c.limit(q.MaxCompletionTokens)
		c.limitName = "max_completion_tokens"
	}
	if len(q.Messages) == 0 {
		return nil, errNoMessages()
	}
	c.id, c.streamParams = "chatcmpl-"+requestName(r, q.RequestID), e.StreamParams
	c.chat(&q.sampling, &q.tooling, c.id, render(q.Messages, q.Tools, q.NoPromptEnd == nil || *q.NoPromptEnd), q.Format)
	c.format = &chatFormat{call: c, q: &q, media: e.Media(r.Context(), body)}
	return c, nil
}

func errNoMessages() *Error {
	return BadField("messages", "too_short", "List should have at least 1 item after validation", "[]")
}

// chat makes the generations of rendered messages, and holds them to what the request demands.
func (c *Call) chat(s *sampling, t *tooling, name string, prompt []int32, format json.RawMessage) {
	if ids, ok := promptTokens(c.Params); ok {
		prompt = ids
	}
	c.add(s, name, prompt, false)
	c.demand = chosen(t.Tools, t.ToolChoice, t.Parallel == nil || *t.Parallel)
	if c.demand.guided == nil {
		c.demand = formatted(format)
	}
	if c.demand.guided != nil {
		for _, g := range c.Gens {
			g.Guide = (&guide{todo: slices.Clone(c.demand.guided)}).next
		}
	}
}

// promptTokens takes the prompt out of kv_transfer_params.
func promptTokens(params core.Params) ([]int32, bool) {
	var ids []int32
	if !params.Read("prompt_token_ids", &ids) {
		return nil, false
	}
	delete(params, "prompt_token_ids")
	return ids, true
}

// chatFormat writes chat completions, whole and streamed.
type chatFormat struct {
	call   *Call
	q      *chatRequest
	within []calling

	media any // ec_transfer_params
}

func (f *chatFormat) Whole(outs []*core.Outcome) any {
	c := f.call
	var choices []python.Object
	for i, o := range outs {
		message := python.Object{"role", "assistant", "content", o.Text, "refusal", nil, "annotations", nil,
			"audio", nil, "function_call", nil}
		if c.demand.tools != nil {
			message = message.With(python.Object{"content", "", "tool_calls", c.demand.chatCalls(o.Tokens)})
		}
		choice := python.Object{"index", i, "message", append(message, "reasoning", nil), "logprobs", nil,
			"finish_reason", c.demand.reason(o.Reason), "stop_reason", o.Stop,
			"token_ids", when(f.q.ReturnTokens, o.Tokens), "routed_experts", nil}
		if f.q.Logprobs {
			choice = choice.With(python.Object{"logprobs", chatLogprobs(o.Tokens, int(f.q.TopLogprobs))})
		}
		choices = append(choices, choice.With(o.Choice))
	}
	var logs any
	if f.q.PromptLogs != nil {
		logs = promptLogprobs(c.Gens[0].Prompt)
	}
	return python.Object{"id", c.id, "object", "chat.completion", "created", c.created, "model", c.model,
		"choices", choices, "service_tier", nil, "system_fingerprint", fingerprint, "usage", c.usage(outs, true, true),
		"prompt_logprobs", logs, "prompt_token_ids", when(f.q.ReturnTokens, c.Gens[0].Prompt), "prompt_text", nil,
		"kv_transfer_params", outs[0].Params, "ec_transfer_params", f.media, "metrics", nil}.With(outs[0].Members)
}

func (f *chatFormat) chunk(choices ...python.Object) python.Object {
	return f.call.chunk("chat.completion.chunk", choices)
}

func (f *chatFormat) begin() {
	f.within = make([]calling, len(f.call.Gens))
	for i, g := range f.call.Gens {
		chunk := f.chunk(python.Object{"index", i, "delta", python.Object{"role", "assistant", "content", ""},
			"logprobs", nil, "finish_reason", nil})
		f.call.sse.json(append(chunk, "prompt_token_ids", when(f.q.ReturnTokens, g.Prompt), "prompt_text", nil))
	}
}

// step writes a choice: the last one has a reason besides.
func (f *chatFormat) step(s core.Step) {
	delta := python.Object{"content", s.Text}
	if f.call.demand.tools != nil {
		delta = f.call.demand.chatDelta(&f.within[s.Index], s)
	}
	var logs any
	if s.HasOne && bool(f.q.Logprobs) {
		logs = chatLogprobs([]int32{s.Token}, int(f.q.TopLogprobs))
	}
	choice := python.Object{"index", s.Index, "delta", delta, "logprobs", logs,
		"finish_reason", reasonOrNull(f.call.demand.reason(s.Reason))}
	if s.Reason != "" {
		choice = append(choice, "stop_reason", s.Stop)
	}
	choice = append(choice, "token_ids", when(s.HasOne && f.q.ReturnTokens, []int32{s.Token}))
	f.call.sse.json(f.call.told(f.chunk(choice), s))
}

func (f *chatFormat) end(outs []*core.Outcome) {
	f.call.close(f.chunk(), outs, true, "system_fingerprint", fingerprint)
}
