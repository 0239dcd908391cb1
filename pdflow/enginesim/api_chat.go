// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"encoding/json"
	"net/http"
)

type chatRequest struct {
	sampling
	Messages            []chatMessage     `json:"messages"`
	MaxCompletionTokens *int              `json:"max_completion_tokens"`
	Tools               []json.RawMessage `json:"tools"`
	NoPromptEnd         *bool             `json:"add_generation_prompt"`
	Logprobs            bool              `json:"logprobs"`
	TopLogprobs         int               `json:"top_logprobs"`
}

type chatMessage struct {
	Role    string      `json:"role"`
	Content chatContent `json:"content"`
}

// chatContent is a string, a list of parts, or null; its text is what counts, and
// media, which the prompt holds by their hashes.
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
		tokens = appendText(append(tokens, tokenIMStart), "tools\n")
		var b bytes.Buffer
		if json.Compact(&b, encode(tools)) == nil {
			tokens = appendText(tokens, b.String())
		}
		tokens = appendText(append(tokens, tokenIMEnd), "\n")
	}
	for _, m := range messages {
		tokens = appendText(append(tokens, tokenIMStart), m.Role+"\n")
		tokens = appendText(tokens, string(m.Content))
		tokens = appendText(append(tokens, tokenIMEnd), "\n")
	}
	if open {
		tokens = appendText(append(tokens, tokenIMStart), "assistant\n")
	}
	return tokens
}

// parseChat reads a /v1/chat/completions request. max_completion_tokens wins over
// max_tokens (capture 06); kv_transfer_params.prompt_token_ids is taken for the
// prompt, whatever the messages say (capture 02b).
func parseChat(e *target, r *http.Request, body []byte) (*call, *apiError) {
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
		return nil, badField("messages", "too_short", "List should have at least 1 item after validation", "[]")
	}
	prompt := render(q.Messages, q.Tools, q.NoPromptEnd == nil || *q.NoPromptEnd)
	if ids, ok := promptTokens(c.params); ok {
		prompt = ids
	}
	id := "chatcmpl-" + requestName(r, q.RequestID)
	c.add(&q.sampling, id, prompt, false)
	c.format = &chatFormat{call: c, q: &q, id: id, media: e.media(r.Context(), body)}
	return c, nil
}

// promptTokens takes the prompt out of kv_transfer_params.
func promptTokens(params kvParams) ([]int32, bool) {
	var ids []int32
	if !params.given("prompt_token_ids") || json.Unmarshal(params["prompt_token_ids"], &ids) != nil {
		return nil, false
	}
	delete(params, "prompt_token_ids")
	return ids, true
}

// chatFormat writes chat completions, whole and streamed.
type chatFormat struct {
	call *call
	q    *chatRequest
	id   string
	sse  *sse
	seen []int

	media any // ec_transfer_params
}

type chatAnswer struct {
	Role         string `json:"role"`
	Content      string `json:"content"`
	Refusal      any    `json:"refusal"`
	Annotations  any    `json:"annotations"`
	Audio        any    `json:"audio"`
	FunctionCall any    `json:"function_call"`
	Reasoning    any    `json:"reasoning"`
}

type chatChoice struct {
	Index         int        `json:"index"`
	Message       chatAnswer `json:"message"`
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

func (f *chatFormat) whole(outs []*outcome) any {
	c := f.call
	b := &chatBody{
		ID: f.id, Object: "chat.completion", Created: c.created, Model: c.model, Fingerprint: fingerprint,
		Usage: usageOf(c, outs, true), KVParams: outs[0].params, ECParams: f.media,
	}
	if f.q.ReturnTokens {
		b.PromptTokenIDs = c.gens[0].prompt
	}
	if f.q.PromptLogs != nil {
		b.PromptLogprobs = promptLogprobs(c.gens[0].prompt)
	}
	for i, o := range outs {
		choice := chatChoice{Index: i, Message: chatAnswer{Role: "assistant", Content: o.text}, FinishReason: o.reason, StopReason: o.stop}
		if f.q.ReturnTokens {
			choice.TokenIDs = o.tokens
		}
		if f.q.Logprobs {
			choice.Logprobs = chatLogprobs(o.tokens, f.q.TopLogprobs)
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
}

type chatDelta struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
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
	return &chatChunk{ID: f.id, Object: "chat.completion.chunk", Created: f.call.created, Model: f.call.model, Choices: choices}
}

// null is a JSON null that omitempty keeps.
var null = json.RawMessage("null")

func (f *chatFormat) begin(s *sse) {
	f.sse = s
	f.seen = make([]int, len(f.call.gens))
	for i := range f.call.gens {
		chunk := f.chunk([]chatOpening{{Index: i, Delta: chatDelta{Role: "assistant"}}})
		chunk.PromptTokenIDs, chunk.PromptText = null, null
		if f.q.ReturnTokens {
			chunk.PromptTokenIDs = f.call.gens[i].prompt
		}
		f.sse.data(encode(chunk))
	}
}

func (f *chatFormat) step(s step) {
	open := chatOpening{Index: s.index, Delta: chatDelta{Content: s.text}}
	var ids []int32
	if s.hasOne {
		f.seen[s.index]++
		if f.q.ReturnTokens {
			ids = []int32{s.token}
		}
		if f.q.Logprobs {
			open.Logprobs = chatLogprobs([]int32{s.token}, f.q.TopLogprobs)
		}
	}
	var chunk *chatChunk
	if s.reason == "" {
		chunk = f.chunk([]chatToken{{open, ids}})
	} else {
		open.FinishReason = s.reason
		chunk = f.chunk([]chatLastToken{{open, s.stop, ids}})
		if !f.call.wantsUsage() {
			chunk.Fingerprint = fingerprint
		}
	}
	if f.call.options != nil && f.call.options.ContinuousUsage {
		n, made := len(f.call.gens[s.index].prompt), f.seen[s.index]
		chunk.Usage = &streamUsage{Prompt: n, Total: n + made, Completion: made}
	}
	f.sse.data(encode(chunk))
}

func (f *chatFormat) end(outs []*outcome) {
	if f.call.wantsUsage() {
		chunk := f.chunk([]struct{}{})
		chunk.Usage, chunk.Fingerprint = streamUsageOf(f.call, outs, true), fingerprint
		f.sse.data(encode(chunk))
	}
	f.sse.data([]byte("[DONE]"))
}
