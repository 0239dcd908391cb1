// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strconv"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// Version is the version of vLLM that the APIs follow.
const Version = "0.32.0"

// fingerprint has the form of vLLM's: the version and eight digits of the configuration's hash.
const fingerprint = "vllm-" + Version + "-10e30e20"

func (c *Call) wantsUsage() bool { return c.options != nil && c.options.IncludeUsage }

// counted is a usage without details.
func counted(prompt, made int) python.Object {
	return python.Object{"prompt_tokens", prompt, "total_tokens", prompt + made, "completion_tokens", made}
}

// usage counts tokens. The n choices of one prompt count it once. Only the chat APIs tell how many tokens went into the
// cache. A whole response has nulls, which a stream leaves out.
func (c *Call) usage(outs []*core.Outcome, chat, whole bool) python.Object {
	prompt, made := 0, 0
	for i, o := range outs {
		if i%max(c.N, 1) == 0 {
			prompt += len(c.Gens[i].Prompt)
		}
		made += len(o.Tokens)
	}
	details := python.Object{"cached_tokens", outs[0].Cached}
	if chat {
		details = append(details, "created_cache_tokens", outs[0].Created)
	} else if whole {
		details = append(details, "created_cache_tokens", nil)
	}
	if !whole {
		return append(counted(prompt, made), "prompt_tokens_details", details)
	}
	return append(counted(prompt, made), "prompt_tokens_details", append(details, "multimodal_tokens", nil),
		"completion_tokens_details", nil)
}

// logprob is a made-up, deterministic log probability.
func logprob(token int32, at int) float64 {
	return -float64(core.Mix(uint64(uint32(token)), uint64(at))%4096) / 1024
}

// completionLogprobs has a null for the very first token of a prompt.
func completionLogprobs(tokens []int32, offset int, prompt bool) any {
	var offsets []int
	var texts []string
	var logprobs, top []any
	for i, t := range tokens {
		text := core.Detokenise([]int32{t})
		offsets, texts = append(offsets, offset+i), append(texts, text)
		if prompt && i == 0 {
			logprobs, top = append(logprobs, nil), append(top, nil)
			continue
		}
		p := logprob(t, offset+i)
		logprobs, top = append(logprobs, p), append(top, map[string]float64{text: p})
	}
	return python.Object{"text_offset", offsets, "token_logprobs", logprobs, "tokens", texts, "top_logprobs", top}
}

func promptLogprobs(tokens []int32) any {
	logs := make([]map[string]python.Object, len(tokens))
	for i, t := range tokens {
		if i > 0 {
			logs[i] = map[string]python.Object{strconv.Itoa(int(t)): {"logprob", logprob(t, i), "rank", 1,
				"decoded_token", core.Detokenise([]int32{t})}}
		}
	}
	return logs
}

func chatLogprobs(tokens []int32, top int) any {
	logs := make([]python.Object, 0, len(tokens))
	for i, t := range tokens {
		l := python.Object{"token", core.Detokenise([]int32{t}), "logprob", logprob(t, i), "bytes", []int{int(t)}}
		best := []python.Object{}
		if top > 0 {
			best = append(best, l)
		}
		logs = append(logs, l.With(python.Object{"top_logprobs", best}))
	}
	return python.Object{"content", logs}
}
