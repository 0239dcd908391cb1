// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"encoding/json"
	"net/http"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

type chatRequest struct {
	sampling
	Messages            []chatMessage     `json:"messages"`
	MaxCompletionTokens *whole            `json:"max_completion_tokens"`
	Tools               []json.RawMessage `json:"tools"`
	NoPromptEnd         *bool             `json:"add_generation_prompt"`
	Logprobs            flag              `json:"logprobs"`
	TopLogprobs         whole             `json:"top_logprobs"`
	ToolChoice          json.RawMessage   `json:"tool_choice"`
	Parallel            *bool             `json:"parallel_tool_calls"`
	Format              json.RawMessage   `json:"response_format"`
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
		return nil, BadField("messages", "too_short", "List should have at least 1 item after validation", "[]")
	}
	prompt := render(q.Messages, q.Tools, q.NoPromptEnd == nil || *q.NoPromptEnd)
	if ids, ok := promptTokens(c.Params); ok {
		prompt = ids
	}
	id := "chatcmpl-" + requestName(r, q.RequestID)
	c.add(&q.sampling, id, prompt, false)
	c.streamParams = e.StreamParams
	d := chosen(q.Tools, q.ToolChoice, q.Parallel == nil || *q.Parallel).orElse(formatted(q.Format))
	c.guide(d)
	c.format = &chatFormat{call: c, q: &q, id: id, demand: d, media: e.Media(r.Context(), body)}
	return c, nil
}

// promptTokens takes the prompt out of kv_transfer_params.
func promptTokens(params core.Params) ([]int32, bool) {
	var ids []int32
	if !params.Given("prompt_token_ids") || json.Unmarshal(params["prompt_token_ids"], &ids) != nil {
		return nil, false
	}
	delete(params, "prompt_token_ids")
	return ids, true
}

// chatFormat writes chat completions, whole and streamed.
type chatFormat struct {
	call   *Call
	q      *chatRequest
	id     string
	demand demand
	sse    *SSE
	seen   []int
	within []calling

	media any // ec_transfer_params
}

type chatOutput struct {
	Role         string     `json:"role"`
	Content      string     `json:"content"`
	Refusal      any        `json:"refusal"`
	Annotations  any        `json:"annotations"`
	Audio        any        `json:"audio"`
	FunctionCall any        `json:"function_call"`
	ToolCalls    []chatCall `json:"tool_calls,omitempty"`
	Reasoning    any        `json:"reasoning"`
}

type chatChoice struct {
	Index         int        `json:"index"`
	Message       chatOutput `json:"message"`
	Logprobs      any        `json:"logprobs"`
	FinishReason  string     `json:"finish_reason"`
	StopReason    any        `json:"stop_reason"`
	TokenIDs      []int32    `json:"token_ids"`
	RoutedExperts any        `json:"routed_experts"`
}

type chatBody struct {
	ID             string       `json:"id"`
	Object         string       `json:"object"`
	Created        int64        `json:"created"`
	Model          string       `json:"model"`
	Choices        []chatChoice `json:"choices"`
	ServiceTier    any          `json:"service_tier"`
	Fingerprint    string       `json:"system_fingerprint"`
	Usage          *usage       `json:"usage"`
	PromptLogprobs any          `json:"prompt_logprobs"`
	PromptTokenIDs []int32      `json:"prompt_token_ids"`
	PromptText     any          `json:"prompt_text"`
	KVParams       any          `json:"kv_transfer_params"`
	ECParams       any          `json:"ec_transfer_params"`
	Metrics        any          `json:"metrics"`
}

func (f *chatFormat) Whole(outs []*core.Outcome) any {
	c := f.call
	b := &chatBody{
		ID: f.id, Object: "chat.completion", Created: c.created, Model: c.model, Fingerprint: fingerprint,
		Usage: usageOf(c, outs, true), KVParams: outs[0].Params, ECParams: f.media,
	}
	if f.q.ReturnTokens {
		b.PromptTokenIDs = c.Gens[0].Prompt
	}
	if f.q.PromptLogs != nil {
		b.PromptLogprobs = promptLogprobs(c.Gens[0].Prompt)
	}
	for i, o := range outs {
		choice := chatChoice{Index: i, Message: chatOutput{Role: "assistant", Content: o.Text},
			FinishReason: f.demand.reason(o.Reason), StopReason: o.Stop}
		if f.demand.tools != nil {
			choice.Message.Content, choice.Message.ToolCalls = "", f.demand.chatCalls(o.Tokens)
		}
		if f.q.ReturnTokens {
			choice.TokenIDs = o.Tokens
		}
		if f.q.Logprobs {
			choice.Logprobs = chatLogprobs(o.Tokens, int(f.q.TopLogprobs))
		}
		b.Choices = append(b.Choices, choice)
	}
	return b
}

type chatChunk struct {
	ID             string       `json:"id"`
	Object         string       `json:"object"`
	Created        int64        `json:"created"`
	Model          string       `json:"model"`
	Choices        any          `json:"choices"`
	Usage          *streamUsage `json:"usage,omitempty"`
	PromptTokenIDs any          `json:"prompt_token_ids,omitempty"`
	PromptText     any          `json:"prompt_text,omitempty"`
	Fingerprint    string       `json:"system_fingerprint,omitempty"`
	KVParams       any          `json:"kv_transfer_params,omitempty"`
}

type chatDelta struct {
	Role      string          `json:"role,omitempty"`
	Content   any             `json:"content,omitempty"` // a string, "" too
	ToolCalls []chatCallDelta `json:"tool_calls,omitempty"`
}

// A chunk's choice comes in three shapes: the role, a token, the last token.
type chatOpening struct {
	Index        int       `json:"index"`
	Delta        chatDelta `json:"delta"`
	Logprobs     any       `json:"logprobs"`
	FinishReason any       `json:"finish_reason"`
}

type chatToken struct {
	chatOpening
	TokenIDs []int32 `json:"token_ids"`
}

type chatLastToken struct {
	chatOpening
	StopReason any     `json:"stop_reason"`
	TokenIDs   []int32 `json:"token_ids"`
}

func (f *chatFormat) chunk(choices any) *chatChunk {
	return &chatChunk{ID: f.id, Object: "chat.completion.chunk", Created: f.call.created, Model: f.call.model,
		Choices: choices}
}

// null is a JSON null that omitempty keeps.
var null = json.RawMessage("null")

func (f *chatFormat) Begin(s *SSE) {
	f.sse = s
	f.seen = make([]int, len(f.call.Gens))
	f.within = make([]calling, len(f.call.Gens))
	for i := range f.call.Gens {
		chunk := f.chunk([]chatOpening{{Index: i, Delta: chatDelta{Role: "assistant", Content: ""}}})
		chunk.PromptTokenIDs, chunk.PromptText = null, null
		if f.q.ReturnTokens {
			chunk.PromptTokenIDs = f.call.Gens[i].Prompt
		}
		f.sse.data(python.Encode(chunk))
	}
}

func (f *chatFormat) Step(s core.Step) {
	open := chatOpening{Index: s.Index, Delta: chatDelta{Content: s.Text}}
	if f.demand.tools != nil {
		open.Delta = chatDelta{ToolCalls: f.demand.chatDelta(&f.within[s.Index], s)}
	}
	var ids []int32
	if s.HasOne {
		f.seen[s.Index]++
		if f.q.ReturnTokens {
			ids = []int32{s.Token}
		}
		if f.q.Logprobs {
			open.Logprobs = chatLogprobs([]int32{s.Token}, int(f.q.TopLogprobs))
		}
	}
	var chunk *chatChunk
	if s.Reason == "" {
		chunk = f.chunk([]chatToken{{open, ids}})
	} else {
		open.FinishReason = f.demand.reason(s.Reason)
		chunk = f.chunk([]chatLastToken{{open, s.Stop, ids}})
		if !f.call.wantsUsage() {
			chunk.Fingerprint = fingerprint
		}
	}
	chunk.KVParams = f.call.streamed(s)
	if f.call.options != nil && f.call.options.ContinuousUsage {
		n, made := len(f.call.Gens[s.Index].Prompt), f.seen[s.Index]
		chunk.Usage = &streamUsage{Prompt: n, Total: n + made, Completion: made}
	}
	f.sse.data(python.Encode(chunk))
}

func (f *chatFormat) End(outs []*core.Outcome) {
	if f.call.wantsUsage() {
		chunk := f.chunk([]struct{}{})
		chunk.Usage, chunk.Fingerprint = streamUsageOf(f.call, outs, true), fingerprint
		f.sse.data(python.Encode(chunk))
	}
	f.sse.data([]byte("[DONE]"))
}
