// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import "strings"

// api is a client API of vLLM. It says how a greedy request for a number of tokens looks in this API.
type api struct {
	name, path string
	body       func(prompt string, maxTokens int) map[string]any
	plain      *api // an API with the same text for the same prompt that knows cache_salt; nil: the API itself
}

var (
	completions = &api{name: "completions", path: "/v1/completions",
		body: func(prompt string, maxTokens int) map[string]any {
			return map[string]any{"prompt": prompt, "max_tokens": maxTokens, "temperature": 0}
		}}
	chat = &api{name: "chat", path: "/v1/chat/completions", body: func(prompt string, maxTokens int) map[string]any {
		return map[string]any{"messages": user(prompt), "max_tokens": maxTokens, "temperature": 0}
	}}
	responses = &api{name: "responses", path: "/v1/responses", plain: chat,
		body: func(prompt string, maxTokens int) map[string]any {
			return map[string]any{"input": prompt, "max_output_tokens": maxTokens, "temperature": 0}
		}}
	messages = &api{name: "messages", path: "/v1/messages", plain: chat,
		body: func(prompt string, maxTokens int) map[string]any {
			return map[string]any{"messages": user(prompt), "max_tokens": maxTokens, "temperature": 0}
		}}
	generate = &api{name: "generate", path: "/inference/v1/generate", plain: completions,
		body: func(prompt string, maxTokens int) map[string]any {
			return map[string]any{"token_ids": tokens(prompt),
				"sampling_params": map[string]any{"max_tokens": maxTokens, "temperature": 0}}
		}}
)

func user(prompt string) []any { return []any{map[string]string{"role": "user", "content": prompt}} }

// tokens are the tiny model's tokens: one for each byte, with the byte's value.
func tokens(text string) []int {
	ids := make([]int, len(text))
	for i := range len(text) {
		ids[i] = int(text[i])
	}
	return ids
}

// piece is a response of any of the APIs, or one event of a stream of chat or completions.
type piece struct {
	Choices []struct { // chat, completions, generate
		Text           string
		Message, Delta struct{ Content string }
		TokenIDs       []int `json:"token_ids"`
	}
	Output  []struct{ Content []struct{ Text string } } // responses
	Content []struct{ Text string }                     // messages
	Usage   *struct {
		PromptTokens int `json:"prompt_tokens"`
		InputTokens  int `json:"input_tokens"`                // the name in responses and messages
		Created      int `json:"cache_creation_input_tokens"` // messages does not count these two in input_tokens
		Read         int `json:"cache_read_input_tokens"`
		Details      struct {
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	Error *struct{ Message string }
}

// text is all the text of a piece.
func (p *piece) text() string {
	var text strings.Builder
	for _, choice := range p.Choices {
		text.WriteString(choice.Text + choice.Message.Content + choice.Delta.Content)
		for _, token := range choice.TokenIDs {
			text.WriteRune(rune(token)) // the tiny model writes ASCII only
		}
	}
	for _, output := range p.Output {
		for _, content := range output.Content {
			text.WriteString(content.Text)
		}
	}
	for _, content := range p.Content {
		text.WriteString(content.Text)
	}
	return text.String()
}
