// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/lab/internal/paced"
)

type request = paced.Request

func spec() model.Spec { return paced.Spec(2000) }

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
		all[i] = request{At: at, Prompt: text.String(), Output: 10 + r.IntN(70)}
		all[i].Body = paced.Body(name, all[i].Prompt, all[i].Output, salt)
	}
	return all
}
