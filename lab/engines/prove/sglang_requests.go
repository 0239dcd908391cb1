// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"maps"
	"time"

	"github.com/pdkit/pdkit/lab/internal/apis"
)

// sglangRequests has each API, streamed and not, lists of prompts, and log probabilities.
func sglangRequests() []question {
	prompt := func(tokens int) string { return newQuestion(apis.SGLang, false, tokens, 0).prompt }
	two := func(member string, a, b int) map[string]any {
		return map[string]any{member: []string{prompt(a), prompt(b)}}
	}
	fromStart := map[string]any{"return_logprob": true, "logprob_start_len": 0}
	both := two("text", 40, 20)
	maps.Copy(both, fromStart)
	return []question{
		newQuestion(apis.Completions, false, 300, 24), newQuestion(apis.Completions, true, 64, 24),
		newQuestion(apis.Chat, false, 31, 24), newQuestion(apis.Chat, true, 500, 24),
		newQuestion(apis.Responses, false, 100, 24), newQuestion(apis.Responses, true, 90, 24),
		newQuestion(apis.Messages, false, 101, 24), newQuestion(apis.Messages, true, 80, 24),
		newQuestion(apis.SGLang, false, 96, 24), newQuestion(apis.SGLang, true, 97, 24),
		newQuestion(apis.Completions, false, 1, 24).with("completions, two prompts", two("prompt", 120, 60)),
		newQuestion(apis.Completions, true, 1, 24).with("completions, two prompts", two("prompt", 50, 200)),
		newQuestion(apis.SGLang, false, 1, 24).with("generate, two prompts", two("text", 70, 30)),
		newQuestion(apis.SGLang, true, 1, 24).with("generate, two prompts", two("text", 40, 90)),
		newQuestion(apis.Completions, false, 70, 8).with("completions, logprobs", map[string]any{"logprobs": 2}),
		newQuestion(apis.Chat, true, 70, 8).with("chat, logprobs", map[string]any{"logprobs": true, "top_logprobs": 2}),
		newQuestion(apis.SGLang, false, 60, 8).with("generate, prompt's logprobs", fromStart),
		newQuestion(apis.SGLang, true, 61, 8).with("generate, prompt's logprobs", fromStart),
		newQuestion(apis.SGLang, false, 1, 8).with("generate, two prompts' logprobs", both),
	}
}

// askSGLang asks as ask does, for 30 seconds at most.
func askSGLang(ctx context.Context, base string, q question, onEvent func()) *response {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return ask(ctx, base, q, onEvent)
}
