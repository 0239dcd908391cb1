// SPDX-License-Identifier: Apache-2.0

// Package paced is a fleet of simulated engines that take a model's time, and a load for it.
package paced

import (
	"encoding/json"
	"hash/fnv"
)

// Request is one of a load. The simulated engines take each byte of a prompt for a token.
type Request struct {
	At     float64 // seconds
	Prompt string
	Output int // tokens
	Body   []byte
}

// NewRequest makes a streamed completion, whose events tell how many tokens each brings.
func NewRequest(at float64, prompt string, output int) Request {
	q := Request{At: at, Prompt: prompt, Output: output}
	q.Body, _ = json.Marshal(map[string]any{"model": "tiny", "prompt": prompt, "max_tokens": output, "stream": true,
		"return_token_ids": true, "stream_options": map[string]bool{"include_usage": true}})
	return q
}

// Keys are those of the prompt's full blocks.
func (q *Request) Keys(blockSize int) (keys []uint64) {
	h := fnv.New64a()
	for i := blockSize; i <= len(q.Prompt); i += blockSize {
		_, _ = h.Write([]byte(q.Prompt[i-blockSize : i]))
		keys = append(keys, h.Sum64()|1)
	}
	return keys
}
