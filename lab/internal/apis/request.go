// SPDX-License-Identifier: Apache-2.0

// Package apis has the client APIs of vLLM and SGLang for programs that send the same request to several engines and
// gateways and compare the responses: how a greedy request looks in each API, and what a response says.
package apis

// API is a client API. It says how a greedy request for a number of tokens looks in it.
type API struct {
	Name, Path string
	Body       func(prompt string, maxTokens int) map[string]any
}

// The APIs. vLLM has the first five, SGLang the first four and the last.
var (
	Completions = &API{"completions", "/v1/completions", func(prompt string, maxTokens int) map[string]any {
		return map[string]any{"prompt": prompt, "max_tokens": maxTokens, "temperature": 0}
	}}
	Chat = &API{"chat", "/v1/chat/completions", func(prompt string, maxTokens int) map[string]any {
		return map[string]any{"messages": user(prompt), "max_tokens": maxTokens, "temperature": 0}
	}}
	Responses = &API{"responses", "/v1/responses", func(prompt string, maxTokens int) map[string]any {
		return map[string]any{"input": prompt, "max_output_tokens": maxTokens, "temperature": 0}
	}}
	Messages = &API{"messages", "/v1/messages", func(prompt string, maxTokens int) map[string]any {
		return map[string]any{"messages": user(prompt), "max_tokens": maxTokens, "temperature": 0}
	}}
	Generate = &API{"generate", "/inference/v1/generate", func(prompt string, maxTokens int) map[string]any {
		return map[string]any{"token_ids": tokens(prompt),
			"sampling_params": map[string]any{"max_tokens": maxTokens, "temperature": 0}}
	}}
	SGLang = &API{"generate", "/generate", func(prompt string, maxTokens int) map[string]any {
		return map[string]any{"text": prompt,
			"sampling_params": map[string]any{"max_new_tokens": maxTokens, "temperature": 0}}
	}}
)

func user(prompt string) []any { return []any{map[string]string{"role": "user", "content": prompt}} }

// tokens are the tokens of the tiny model and of simulated engines: one for each byte, with the byte's value.
func tokens(text string) []int {
	ids := make([]int, len(text))
	for i := range len(text) {
		ids[i] = int(text[i])
	}
	return ids
}
