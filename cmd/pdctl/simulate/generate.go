// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
)

// Generated describes a generated trace. It has conversations of some turns, each with one of a few system prompts, of
// which some are far more popular than others, and single prompts that share nothing.
type Generated struct {
	Rate, Seconds float64 // new conversations a second, and for how long
	systems       int
	systemBytes   int     // of the largest system prompt; the smallest has a quarter of it
	turns         int     // at most
	think         float64 // seconds between a response's request and the next, on average
	single        float64 // share of requests whose prompt shares nothing
	singleBytes   int     // of the largest of these; the smallest has a thirteenth of it
}

// Usual is the usual generated trace.
func Usual() Generated {
	return Generated{Rate: 24, Seconds: 120, systems: 24, systemBytes: 24 << 10, turns: 6, think: 12, single: .25,
		singleBytes: 13_000}
}

// Short is a generated trace of short prompts, most of which share nothing.
func Short() Generated {
	return Generated{Rate: 48, Seconds: 60, systems: 8, systemBytes: 2 << 10, turns: 3, think: 12, single: .7,
		singleBytes: 3000}
}

// Trace generates the trace. The same seed gives the same one.
func (g Generated) Trace(seed uint64) (*Trace, error) {
	if !(g.Rate > 0 && g.Seconds > 0 && g.Rate*g.Seconds < 1e7) {
		return nil, errors.New("the rate and the length of a generated trace are above 0, and it has fewer than 10⁷ " +
			"conversations")
	}
	r := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // the same trace each time
	sizes := make([]int, g.systems)
	shares := make([]float64, g.systems)
	sum := 0.0
	for i := range sizes {
		sizes[i] = g.systemBytes/4 + r.IntN(g.systemBytes*3/4)
		sum += 1 / float64(i+1)
		shares[i] = sum
	}
	var all []entry
	n := 0
	for at := r.ExpFloat64() / g.Rate; at < g.Seconds; at += r.ExpFloat64() / g.Rate {
		n++
		session := "s" + strconv.Itoa(n)
		if r.Float64() < g.single {
			all = append(all, entry{At: at, Session: session,
				Segments: []segment{{session, g.singleBytes/13 + r.IntN(g.singleBytes*12/13)}}, Output: output(r)})
			continue
		}
		system, _ := slices.BinarySearch(shares, r.Float64()*sum)
		segments := []segment{{"system" + strconv.Itoa(system), sizes[system]}}
		when := at
		for turn := range 1 + r.IntN(g.turns) {
			segments = append(segments, segment{fmt.Sprintf("%s question %d", session, turn), 100 + r.IntN(1500)})
			out, answer := output(r), fmt.Sprintf("%s answer %d", session, turn)
			all = append(all, entry{At: when, Session: session, Segments: slices.Clone(segments), Answer: answer,
				Output: out})
			segments = append(segments, segment{answer, out * tokenBytes})
			when += 4 + r.ExpFloat64()*g.think
		}
	}
	return newTrace(all)
}

// output returns the length of a response in tokens. Most are short, some are long.
func output(r *rand.Rand) int { return int(min(max(math.Exp(4.7+.7*r.NormFloat64()), 8), 1200)) }
