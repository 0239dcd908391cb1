// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strconv"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// Version is the version of vLLM that the APIs follow.
const Version = "0.32.0"

// fingerprint has the form of vLLM's: the version and eight digits of the configuration's hash.
const fingerprint = "vllm-" + Version + "-10e30e20"

// usage is the token count of a whole response; nulls are sent.
type usage struct {
	Prompt     int          `json:"prompt_tokens"`
	Total      int          `json:"total_tokens"`
	Completion int          `json:"completion_tokens"`
	Details    usageDetails `json:"prompt_tokens_details"`
	Completed  any          `json:"completion_tokens_details"`
}

type usageDetails struct {
	Cached     int  `json:"cached_tokens"`
	Created    *int `json:"created_cache_tokens"`
	Multimodal any  `json:"multimodal_tokens"`
}

// streamUsage is the token count in a stream; nulls are left out.
type streamUsage struct {
	Prompt     int            `json:"prompt_tokens"`
	Total      int            `json:"total_tokens"`
	Completion int            `json:"completion_tokens"`
	Details    *streamDetails `json:"prompt_tokens_details,omitempty"`
}

type streamDetails struct {
	Cached  int  `json:"cached_tokens"`
	Created *int `json:"created_cache_tokens,omitempty"`
}

func (c *Call) wantsUsage() bool { return c.options != nil && c.options.IncludeUsage }

// usageOf counts tokens. The n choices of one prompt count it once. Only the chat APIs tell created.
func usageOf(c *Call, outs []*core.Outcome, created bool) *usage {
	u := &usage{}
	for i, o := range outs {
		if i%max(c.N, 1) == 0 {
			u.Prompt += len(c.Gens[i].Prompt)
		}
		u.Completion += len(o.Tokens)
	}
	u.Total = u.Prompt + u.Completion
	u.Details.Cached = outs[0].Cached
	if created {
		u.Details.Created = &outs[0].Created
	}
	return u
}

func streamUsageOf(c *Call, outs []*core.Outcome, created bool) *streamUsage {
	u := usageOf(c, outs, created)
	return &streamUsage{Prompt: u.Prompt, Total: u.Total, Completion: u.Completion,
		Details: &streamDetails{Cached: u.Details.Cached, Created: u.Details.Created}}
}

// logprob is a made-up, deterministic log probability.
func logprob(token int32, at int) float64 {
	return -float64(core.Mix(uint64(uint32(token)), uint64(at))%4096) / 1024
}

type completionLogs struct {
	TextOffset    []int                `json:"text_offset"`
	TokenLogprobs []*float64           `json:"token_logprobs"`
	Tokens        []string             `json:"tokens"`
	TopLogprobs   []map[string]float64 `json:"top_logprobs"`
}

// completionLogprobs has a null for the very first token of a prompt.
func completionLogprobs(tokens []int32, offset int, prompt bool) any {
	l := &completionLogs{}
	for i, t := range tokens {
		text := core.Detokenise([]int32{t})
		l.TextOffset = append(l.TextOffset, offset+i)
		l.Tokens = append(l.Tokens, text)
		if prompt && i == 0 {
			l.TokenLogprobs, l.TopLogprobs = append(l.TokenLogprobs, nil), append(l.TopLogprobs, nil)
			continue
		}
		p := logprob(t, offset+i)
		l.TokenLogprobs = append(l.TokenLogprobs, &p)
		l.TopLogprobs = append(l.TopLogprobs, map[string]float64{text: p})
	}
	return l
}

type promptLog struct {
	Logprob float64 `json:"logprob"`
	Rank    int     `json:"rank"`
	Token   string  `json:"decoded_token"`
}

func promptLogprobs(tokens []int32) any {
	logs := make([]map[string]promptLog, len(tokens))
	for i, t := range tokens {
		if i > 0 {
			logs[i] = map[string]promptLog{strconv.Itoa(int(t)): {logprob(t, i), 1, core.Detokenise([]int32{t})}}
		}
	}
	return logs
}

type chatLog struct {
	Token   string    `json:"token"`
	Logprob float64   `json:"logprob"`
	Bytes   []int     `json:"bytes"`
	Top     []chatLog `json:"top_logprobs,omitempty"`
}

func chatLogprobs(tokens []int32, top int) any {
	logs := make([]any, 0, len(tokens))
	for i, t := range tokens {
		l := chatLog{Token: core.Detokenise([]int32{t}), Logprob: logprob(t, i), Bytes: []int{int(t)}}
		best := []chatLog{}
		if top > 0 {
			best = append(best, l)
		}
		logs = append(logs, struct {
			Token   string    `json:"token"`
			Logprob float64   `json:"logprob"`
			Bytes   []int     `json:"bytes"`
			Top     []chatLog `json:"top_logprobs"`
		}{l.Token, l.Logprob, l.Bytes, best})
	}
	return map[string]any{"content": logs}
}
