// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"strings"

	"github.com/pdkit/pdkit/enginesim/model"
)

// request is one of a load. The engines take each byte of a prompt for a token: simulated ones always do, and real ones
// with the model of lab/engines.
type request struct {
	at     float64
	prompt string
	output int
	body   []byte
}

// spec is an engine whose steps are so long that what HTTP, the flow and the machine take is small beside them.
func spec() model.Spec {
	return model.Spec{
		StepTime:   model.StepTime{Base: .01, PerRequest: 2e-4, PerContextToken: 1e-6, PerPrefillToken: 2e-4},
		StepTokens: 512, MaxRunning: 256, Blocks: 2000, BlockSize: 16, BytesPerToken: 1e5,
	}
}

// link moves 1,000 tokens in 50 ms.
var link = model.Link{Latency: .002, BytesPerSecond: 2e9}

// newLoad makes requests that come at random (Poisson), a third of whose prompts begin as others do. name is the
// model's. Engines find nothing of loads with another salt or seed in their caches.
func newLoad(name, salt string, seed uint64, n int, rate float64) []request {
	r := rand.New(rand.NewPCG(seed, 3)) //nolint:gosec // a load, no secret
	all := make([]request, n)
	salt = fmt.Sprintf("%s round %d", salt, seed) // engines remember the rounds before
	at := 1.0
	for i := range all {
		at += r.ExpFloat64() / rate
		var text strings.Builder
		fmt.Fprintf(&text, "%06d.%06d.", r.IntN(1e6), i)
		if r.IntN(3) == 0 {
			text.Reset()
			text.WriteString(strings.Repeat(fmt.Sprintf("system %02d. ", r.IntN(16)), 24))
			fmt.Fprintf(&text, "%06d", i)
		}
		text.WriteString(strings.Repeat("word ", 20+r.IntN(120)))
		all[i] = request{at: at, prompt: text.String(), output: 10 + r.IntN(70)}
		all[i].body = body(name, all[i].prompt, all[i].output, salt)
	}
	return all
}

// body asks for a streamed completion whose events tell how many tokens each brings. Only requests with the same salt
// share what engines have cached.
func body(name, prompt string, output int, salt string) []byte {
	b, _ := json.Marshal(map[string]any{"model": name, "prompt": prompt, "max_tokens": output, "stream": true,
		"temperature": 0, "return_token_ids": true, "cache_salt": salt})
	return b
}

// keys are those of the prompt's full blocks.
func (q *request) keys(blockSize int) (keys []uint64) {
	h := fnv.New64a()
	for i := blockSize; i <= len(q.prompt); i += blockSize {
		_, _ = h.Write([]byte(q.prompt[i-blockSize : i]))
		keys = append(keys, h.Sum64()|1)
	}
	return keys
}
