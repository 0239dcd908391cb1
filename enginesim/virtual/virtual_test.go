// SPDX-License-Identifier: Apache-2.0

package virtual_test

import (
	"context"
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/enginesim/virtual"
)

// conversations come at a mean rate; prompts of 16 groups share a beginning.
func conversations(seed uint64, n int, rate float64) iter.Seq[virtual.Arrival] {
	return func(yield func(virtual.Arrival) bool) {
		r := rand.New(rand.NewPCG(seed, 2))
		at := 0.0
		for i := range n {
			at += r.ExpFloat64() / rate
			a := virtual.Arrival{At: at, Prompt: 500 + r.IntN(6000), Output: 1 + r.IntN(300)}
			group := uint64(r.IntN(16))
			for b := range a.Prompt / 16 {
				key := group<<32 | uint64(b+1)
				if b > 100 {
					key = uint64(i+100)<<32 | uint64(b+1)
				}
				a.Keys = append(a.Keys, key)
			}
			if !yield(a) {
				return
			}
		}
	}
}

// fleet has prefill engines, then as many decode engines, over links of some bytes a second.
func fleet(each int, bytesPerSecond float64) virtual.Config {
	return virtual.Config{
		Engines: slices.Repeat([]model.Spec{model.Llama8B()}, 2*each), Handshake: .1,
		Link: func(int, int) model.Link { return model.Link{Latency: .001, BytesPerSecond: bytesPerSecond} },
	}
}

// turns splits each request, by pairs in turn.
func turns(each int) virtual.Router {
	return func(_ *virtual.Fleet, i int, _ *virtual.Arrival) (virtual.Route, error) {
		return virtual.Route{Split: true, Prefill: i % each, Decode: each + i/each%each}, nil
	}
}

func run(tb testing.TB, c virtual.Config, a iter.Seq[virtual.Arrival], r virtual.Router) *virtual.Result {
	tb.Helper()
	out, err := virtual.Run(tb.Context(), c, a, r)
	require.NoError(tb, err)
	return out
}

func TestTheSameArrivalsGiveTheSameResult(t *testing.T) {
	a := run(t, fleet(2, 20e9), conversations(1, 1000, 8), turns(2))
	b := run(t, fleet(2, 20e9), conversations(1, 1000, 8), turns(2))
	require.Equal(t, a, b)
	require.NotEqual(t, a, run(t, fleet(2, 20e9), conversations(2, 1000, 8), turns(2)))
}

func TestEachRequestIsComputedOnceMovedAndServed(t *testing.T) {
	done, prefilled := 0, 0
	c := fleet(2, 20e9)
	r := run(t, c, conversations(1, 1000, 8), func(f *virtual.Fleet, i int, a *virtual.Arrival) (virtual.Route, error) {
		route, err := turns(2)(f, i, a)
		route.Done, route.PrefillDone = func() { done++ }, func() { prefilled++ }
		return route, err
	})
	require.Equal(t, 1000, done)
	require.Equal(t, 1000, prefilled)
	require.Equal(t, 4, r.Pairs)
	prompts, outputs, reused, fetched := 0, 0, 0, 0
	spec := c.Engines[0]
	for _, o := range r.Outcomes {
		require.True(t, o.Served())
		prompts, outputs, reused, fetched = prompts+o.Prompt, outputs+o.Output, reused+o.Reused, fetched+o.Fetched
		least := spec.PerPrefillToken*float64(o.Prompt-o.Reused) + 2*spec.Base +
			float64(o.Fetched)*spec.BytesPerToken/20e9
		require.GreaterOrEqual(t, o.TTFT(), least*.999, "no token comes before its prefill and its KV")
		require.GreaterOrEqual(t, o.End-o.First, float64(o.Output-1)*spec.Base*.999)
	}
	var p, d model.Stats
	for i, s := range r.Engines {
		require.LessOrEqual(t, s.PeakBlocks, spec.Blocks)
		sum := &p
		if i >= 2 {
			sum = &d
		}
		sum.Computed, sum.Reused = sum.Computed+s.Computed, sum.Reused+s.Reused
		sum.Made, sum.Fetched = sum.Made+s.Made, sum.Fetched+s.Fetched
	}
	require.Equal(t, prompts, p.Computed+p.Reused)
	require.Equal(t, reused, p.Reused)
	require.Equal(t, 1000, p.Made, "prefill makes one token")
	require.Equal(t, outputs, d.Made)
	require.Equal(t, fetched, d.Fetched)
	require.Equal(t, prompts, d.Fetched+d.Reused)
}

func TestFasterLinksAndFewerRequestsAreNeverSlower(t *testing.T) {
	mean := func(rate, bandwidth float64) (sum float64) {
		r := run(t, fleet(2, bandwidth), conversations(3, 600, rate), turns(2))
		for _, o := range r.Outcomes {
			sum += o.TTFT() / float64(len(r.Outcomes))
		}
		return sum
	}
	before := 1e9
	for _, bandwidth := range []float64{.5e9, 1e9, 2e9, 5e9, 20e9, 100e9, 0} {
		now := mean(4, bandwidth)
		require.LessOrEqual(t, now, before, "%g bytes/s", bandwidth)
		before = now
	}
	before = 0
	for _, rate := range []float64{1, 2, 4, 8, 16, 32} {
		now := mean(rate, 20e9)
		require.GreaterOrEqual(t, now, before, "%g requests/s", rate)
		before = now
	}
}

func TestOneEngineServesAloneAndARouterRefuses(t *testing.T) {
	router := func(_ *virtual.Fleet, i int, _ *virtual.Arrival) (virtual.Route, error) {
		return virtual.Route{Decode: i % 2, Refuse: i%3 == 0}, nil
	}
	r := run(t, fleet(1, 20e9), conversations(1, 30, 2), router)
	served := 0
	for i, o := range r.Outcomes {
		require.Equal(t, i%3 == 0, o.Refused)
		require.Equal(t, -1, o.Prefill)
		if o.Served() {
			served++
			require.Greater(t, o.End, o.At)
		}
	}
	require.Equal(t, 20, served)
	require.Zero(t, r.Pairs)
}

func TestTheFirstTransferOfAPairTakesAHandshakeLonger(t *testing.T) {
	c := fleet(1, 20e9)
	with := run(t, c, conversations(1, 3, .01), turns(1))
	c.Handshake = 0
	without := run(t, c, conversations(1, 3, .01), turns(1))
	assert.InDelta(t, .1, with.Outcomes[0].TTFT()-without.Outcomes[0].TTFT(), 1e-9)
	assert.InDelta(t, 0, with.Outcomes[1].TTFT()-without.Outcomes[1].TTFT(), 1e-9)
}

func TestWhatCannotBeIsSaid(t *testing.T) {
	at := func(times ...float64) iter.Seq[virtual.Arrival] {
		return func(yield func(virtual.Arrival) bool) {
			for _, t := range times {
				if !yield(virtual.Arrival{At: t, Prompt: 10, Output: 1}) {
					return
				}
			}
		}
	}
	_, err := virtual.Run(t.Context(), fleet(1, 0), at(2, 1), turns(1))
	require.ErrorContains(t, err, "earlier")
	_, err = virtual.Run(t.Context(), fleet(1, 0), at(1), turns(7))
	require.ErrorContains(t, err, "not there")
	_, err = virtual.Run(t.Context(), virtual.Config{Engines: make([]model.Spec, 1)}, at(1), turns(1))
	require.Error(t, err)
	ctx, stop := context.WithCancel(t.Context())
	stop()
	_, err = virtual.Run(ctx, fleet(1, 0), at(1), turns(1))
	require.ErrorIs(t, err, context.Canceled)

	small := fleet(1, 0)
	small.Engines[1].Blocks = 1
	r, err := virtual.Run(t.Context(), small, func(yield func(virtual.Arrival) bool) {
		yield(virtual.Arrival{Prompt: 100, Output: 1})
	}, turns(1))
	require.NoError(t, err)
	assert.True(t, r.Outcomes[0].Failed, "no memory of D ever holds it")
}

func ExampleRun() {
	arrivals := slices.Values([]virtual.Arrival{{At: 0, Prompt: 4000, Output: 100}, {At: .1, Prompt: 200, Output: 100}})
	fleet := virtual.Config{
		Engines: []model.Spec{model.Llama8B(), model.Llama8B()},
		Link:    func(int, int) model.Link { return model.Link{BytesPerSecond: 20e9} },
	}
	result, err := virtual.Run(context.Background(), fleet, arrivals,
		func(_ *virtual.Fleet, _ int, a *virtual.Arrival) (virtual.Route, error) {
			return virtual.Route{Split: a.Prompt > 1000, Prefill: 0, Decode: 1}, nil
		})
	if err != nil {
		panic(err)
	}
	for _, o := range result.Outcomes {
		fmt.Printf("first token after %.0f ms, then one each %.1f ms\n", 1000*o.TTFT(), 1000*o.TPOT())
	}
	// Output:
	// first token after 168 ms, then one each 7.2 ms
	// first token after 13 ms, then one each 7.1 ms
}
