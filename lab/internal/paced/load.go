// SPDX-License-Identifier: Apache-2.0

// Package paced is a fleet of simulated engines that take a model's time, and a load for it.
package paced

import (
	"encoding/json"
	"hash/fnv"
	"math/rand/v2"
	"time"

	"github.com/pdkit/pdkit/enginesim/model"
)

// Spec is an engine whose steps are so long that what HTTP, the flow and the machine take is small beside them: 5,000
// tokens of prompt a second.
func Spec(blocks int) model.Spec {
	return model.Spec{
		StepTime:   model.StepTime{Base: .01, PerRequest: 2e-4, PerContextToken: 1e-6, PerPrefillToken: 2e-4},
		StepTokens: 512, MaxRunning: 256, Blocks: blocks, BlockSize: 16, BytesPerToken: 1e5,
	}
}

// Request is one of a load. The engines take each byte of a prompt for a token: simulated ones always do, and real ones
// with the model of lab/engines.
type Request struct {
	At     float64 // seconds
	Prompt string
	Output int // tokens
	Body   []byte
}

// Poisson returns requests that come at random for a while, rate a second.
func Poisson(r *rand.Rand, rate float64, lasts time.Duration) (load []Request) {
	for at := r.ExpFloat64() / rate; at <= lasts.Seconds(); at += r.ExpFloat64() / rate {
		load = append(load, Request{At: at})
	}
	return load
}

// Body asks for a streamed completion whose events tell how many tokens each brings. Engines share what they cached
// only among requests with the same salt, which may be empty.
func Body(name, prompt string, output int, salt string) []byte {
	m := map[string]any{"model": name, "prompt": prompt, "max_tokens": output, "stream": true, "temperature": 0,
		"return_token_ids": true, "stream_options": map[string]bool{"include_usage": true}}
	if salt != "" {
		m["cache_salt"] = salt
	}
	b, _ := json.Marshal(m)
	return b
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
