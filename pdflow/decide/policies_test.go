// SPDX-License-Identifier: Apache-2.0

package decide_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/pdflow/decide"
)

// h100 is Llama-3.1-8B on an H100.
var h100 = decide.Speed{Base: 6.83e-3, PerRequest: 4.42e-6, PerContext: 0.0762e-6, PerPrompt: 31.4e-6}

func decided(p decide.Policy, in *decide.Input) decide.Decision {
	out := decide.Decision{Action: decide.Refuse, Prefill: 7, Decode: 7, TTFT: 7, ITL: 7, Reason: "of another request"}
	p.Decide(in, &out)
	return out
}

// fleet has two engines of each role, of which those of decode may serve alone.
func fleet(prompt int) *decide.Input {
	in := &decide.Input{Prompt: prompt, Exact: true, TokenBytes: 131_072, Link: 10e9,
		Prefill: []decide.Candidate{{Speed: h100}, {Speed: h100}},
		Decode:  []decide.Candidate{{Speed: h100, Alone: true}, {Speed: h100, Alone: true}}}
	for i := range in.Decode {
		in.Decode[i].Running, in.Decode[i].Context = 32, 32*2000
	}
	return in
}

func TestAlwaysAndNeverLeaveTheEnginesToTheScheduler(t *testing.T) {
	in := fleet(1000)
	assert.Equal(t, decide.Decision{Action: decide.Split, Prefill: decide.Any, Decode: decide.Any,
		Reason: decide.ReasonPolicy}, decided(decide.Always(), in))
	assert.Equal(t, decide.Decision{Action: decide.DecodeAlone, Prefill: decide.Any, Decode: decide.Any,
		Reason: decide.ReasonPolicy}, decided(decide.Never(), in))
	for i := range in.Decode {
		in.Decode[i].Alone = false
	}
	assert.Equal(t, decide.Undecided, decided(decide.Never(), in).Action, "no engine may serve alone")
}

func TestTheThresholdCountsWhatDecodeHasNotCached(t *testing.T) {
	const alone, undecided = decide.DecodeAlone, decide.Undecided
	for name, c := range map[string]struct {
		prompt, uncached, least int // and the policy's thresholds
		cached                  [2]int
		want                    decide.Action
		decode                  int
		reason                  string
	}{
		"a long prompt":                       {4000, 1024, 0, [2]int{}, undecided, decide.Any, ""},
		"a short one":                         {1000, 1024, 0, [2]int{}, alone, decide.Any, decide.ReasonShort},
		"a long one, mostly cached":           {4000, 1024, 0, [2]int{0, 3000}, alone, 1, decide.ReasonCached},
		"the engine with most":                {4000, 1024, 0, [2]int{3500, 3000}, alone, 0, decide.ReasonCached},
		"exactly the threshold":               {1024, 1024, 0, [2]int{}, undecided, decide.Any, ""},
		"off":                                 {1, 0, 0, [2]int{}, undecided, decide.Any, ""},
		"by the prompt":                       {500, 0, 512, [2]int{}, alone, decide.Any, decide.ReasonShort},
		"by the prompt, and more cached":      {500, 0, 512, [2]int{0, 900}, alone, 1, decide.ReasonShort},
		"not by the prompt, with some cached": {600, 0, 512, [2]int{0, 500}, undecided, decide.Any, ""},
	} {
		in := fleet(c.prompt)
		in.Decode[0].Cached, in.Decode[1].Cached = c.cached[0], c.cached[1]
		got := decided(decide.Threshold(c.uncached, c.least), in)
		want := decide.Decision{Action: c.want, Prefill: decide.Any, Decode: c.decode, Reason: c.reason}
		assert.Equal(t, want, got, name)
	}
}

func TestNoPolicyLetsAnEngineServeAloneThatMayNot(t *testing.T) {
	for name, p := range map[string]decide.Policy{"never": decide.Never(), "threshold": decide.Threshold(1e6, 1e6),
		"predicted": decide.Predicted(decide.PredictedOptions{})} {
		in := fleet(10)
		in.Prefill[0].QueueTokens, in.Prefill[1].QueueTokens = 1e6, 1e6 // each wants to
		in.Decode[0].Alone, in.Decode[1].Alone = false, false
		assert.NotEqual(t, decide.DecodeAlone, decided(p, in).Action, name)
		in.Decode[1].Alone = true
		in.Decode[0].Cached = 10
		got := decided(p, in)
		assert.Equal(t, decide.DecodeAlone, got.Action, name)
		assert.NotEqual(t, 0, got.Decode, name)
	}
}

func TestAChainAsksUntilAPolicyHasDecided(t *testing.T) {
	chain := decide.Chain(decide.Threshold(512, 0), decide.Predicted(decide.PredictedOptions{}), decide.Always())
	assert.Equal(t, decide.ReasonShort, decided(chain, fleet(100)).Reason)
	assert.Positive(t, decided(chain, fleet(4000)).TTFT, "the second policy predicts")
	in := fleet(4000)
	in.Prefill, in.Decode = nil, nil
	assert.Equal(t, decide.ReasonPolicy, decided(chain, in).Reason, "the last one decides what nobody else can")
	assert.Equal(t, decide.Undecided, decided(decide.Chain(), in).Action)
}

func TestAnIdleDecodeEngineServesAloneAndABusyOneIsSpared(t *testing.T) {
	p := decide.Predicted(decide.PredictedOptions{})
	in := fleet(500)
	in.Class.ITL = 20 * time.Millisecond
	got := decided(p, in)
	assert.Equal(t, decide.Split, got.Action, "32 streams run at each decode engine")
	assert.Equal(t, decide.ReasonInterference, got.Reason)
	in.Decode[1].Running, in.Decode[1].Context = 0, 0
	got = decided(p, in)
	assert.Equal(t, decide.DecodeAlone, got.Action)
	assert.Equal(t, 1, got.Decode)
	assert.Equal(t, decide.ReasonFaster, got.Reason)
	// one step, and 500 tokens
	assert.InDelta(t, (6.83e-3 + 500*31.4e-6), got.TTFT.Seconds(), 1e-6)
	beside := 1 - 500*31.4e-6/30 // what prefill leaves of 30 s
	assert.InDelta(t, (6.83e-3+4.42e-6+500*0.0762e-6)/beside, got.ITL.Seconds(), 1e-6)
}

func TestPrefillMovesToDecodeWherePrefillEnginesAreBehind(t *testing.T) {
	p := decide.Predicted(decide.PredictedOptions{})
	in := fleet(2000)
	in.Class.ITL = 50 * time.Millisecond
	assert.Equal(t, decide.Split, decided(p, in).Action)
	in.Prefill[0].QueueTokens, in.Prefill[1].QueueTokens = 200_000, 300_000 // 6 s and 9 s
	got := decided(p, in)
	assert.Equal(t, decide.DecodeAlone, got.Action)
	assert.Less(t, got.TTFT, 200*time.Millisecond)
}

// A decode engine that prefills for half of its time makes tokens half as fast.
func TestADecodeEngineThatPrefillsMuchIsSpared(t *testing.T) {
	p := decide.Predicted(decide.PredictedOptions{})
	in := fleet(1000)
	in.Class.ITL = 20 * time.Millisecond
	calm := decided(p, in).ITL
	in.Decode[0].Prefilled = 0.5 / h100.PerPrompt
	assert.Equal(t, 1, decided(p, in).Decode)
	in.Decode[1].Prefilled = in.Decode[0].Prefilled
	assert.InEpsilon(t, 2*calm.Seconds(), decided(p, in).ITL.Seconds(), 0.01)
}

// Requests that come soon count, and of a long queue before prefill only some: they do not come at once.
func TestRequestsThatComeSoonCount(t *testing.T) {
	p := decide.Predicted(decide.PredictedOptions{})
	in := fleet(1000)
	in.Decode[0].Coming, in.Decode[0].ComingContext = 8, 8*2000
	assert.Equal(t, 1, decided(p, in).Decode)
	in.Decode[1].Coming, in.Decode[1].ComingContext = 8, 8*2000
	eight := decided(p, in).ITL
	for i := range in.Decode {
		in.Decode[i].Coming, in.Decode[i].ComingContext = 800, 800*2000
	}
	assert.Less(t, decided(p, in).ITL, eight+time.Millisecond)
}

// What an engine has need not be computed again while the objective is met: its time is other requests'.
func TestThePairWithTheCacheIsChosenUnlessItsQueueIsTooLong(t *testing.T) {
	p := decide.Predicted(decide.PredictedOptions{})
	in := fleet(8000)
	in.Decode[0].Alone, in.Decode[1].Alone = false, false
	in.Prefill[1].Cached, in.Prefill[1].CachedExact = 7000, true
	assert.Equal(t, 1, decided(p, in).Prefill)
	in.Prefill[1].QueueTokens = 20_000
	assert.Equal(t, 1, decided(p, in).Prefill)
	in.Prefill[1].QueueTokens = 60_000
	assert.Equal(t, 0, decided(p, in).Prefill)
}

// Where a decode engine has most of the prompt, another one that is idle does not compute it again.
func TestAnIdleEngineDoesNotComputeWhatABusyOneHas(t *testing.T) {
	p := decide.Predicted(decide.PredictedOptions{})
	in := fleet(8000)
	in.Prefill = nil
	in.Decode[0].Running, in.Decode[0].Context = 40, 40*2000
	in.Decode[0].Cached, in.Decode[0].CachedExact = 7500, true
	out := decided(p, in)
	assert.Equal(t, 0, out.Decode)
	assert.Equal(t, decide.DecodeAlone, out.Action)
}

func TestASlowLinkSpeaksAgainstASplit(t *testing.T) {
	p := decide.Predicted(decide.PredictedOptions{})
	in := fleet(6000)
	in.Class.ITL = 50 * time.Millisecond
	assert.Equal(t, decide.Split, decided(p, in).Action)
	in.Prefill[0].Moving, in.Prefill[1].Moving = 200_000, 300_000 // 2.6 s and 3.9 s
	assert.Equal(t, decide.DecodeAlone, decided(p, in).Action, "what is sent before takes too long")
	in.Prefill[1].Moving = 0
	got := decided(p, in)
	assert.Equal(t, decide.Split, got.Action)
	assert.Equal(t, 1, got.Prefill)
	in.Decode[0].Moving, in.Decode[1].Moving = 300_000, 0
	assert.Equal(t, 1, decided(p, in).Decode, "what is fetched before, too")
	in.Decode[0].Moving = 0
	in.Link = 100e6 // 6000 tokens of 128 KiB take 7.9 s
	assert.Equal(t, decide.DecodeAlone, decided(p, in).Action)
	in.Decode[0].Cached, in.Decode[0].CachedExact = 5990, true
	in.Decode[1].Alone, in.Decode[0].Alone = false, false
	assert.Equal(t, 0, decided(p, in).Decode, "nothing is fetched that is there")
}

func TestAPairThatCannotExchangeKVIsNotChosen(t *testing.T) {
	p := decide.Predicted(decide.PredictedOptions{})
	in := fleet(4000)
	in.Decode[0].Alone, in.Decode[1].Alone = false, false
	in.Decode[0].Apart, in.Decode[1].Apart = 0b11, 0b01
	in.Prefill[1].QueueTokens = 50_000
	got := decided(p, in)
	assert.Equal(t, [2]int{1, 1}, [2]int{got.Prefill, got.Decode})
	in.Decode[1].Apart = 0b11
	assert.Equal(t, decide.Undecided, decided(p, in).Action)
}

func TestDecodeEnginesWithoutMemoryAreLeftOut(t *testing.T) {
	p := decide.Predicted(decide.PredictedOptions{})
	in := fleet(4000)
	in.Decode[0].KV = decide.Memory{Free: 1000, Total: 65_000}
	in.Decode[1].KV = decide.Memory{Free: 9000, Total: 85_000}
	assert.Equal(t, 1, decided(p, in).Decode)
	in.Decode[0].KV, in.Decode[1].KV = decide.Memory{Free: 4500, Total: 65_000}, decide.Memory{Free: 3000, Total: 3000}
	assert.Equal(t, 0, decided(p, in).Decode, "the prompt never fits into the other one")
	in.Decode[0].KV, in.Decode[1].KV = decide.Memory{}, decide.Memory{}
	in.Decode[0].Queue = 3
	assert.Equal(t, 1, decided(p, in).Decode, "three requests wait for the first")
}

func TestOnlyWhatNoOptionCanServeInTimeIsRefused(t *testing.T) {
	p := decide.Predicted(decide.PredictedOptions{TTFT: time.Second})
	in := fleet(4000)
	in.Class.Refusable = true
	for i := range 2 {
		in.Prefill[i].QueueTokens, in.Decode[i].QueueTokens = 200_000, 300_000
	}
	got := decided(p, in)
	assert.Equal(t, decide.Decision{Action: decide.Refuse, Prefill: decide.Any, Decode: decide.Any, TTFT: got.TTFT,
		ITL: got.ITL, Reason: decide.ReasonObjectives, RetryAfter: got.RetryAfter}, got)
	assert.InDelta(t, 6.2, got.RetryAfter.Seconds(), 1.5, "the best option has 204,000 tokens of 31.4 µs before it")
	in.Class.Refusable = false
	assert.NotEqual(t, decide.Refuse, decided(p, in).Action)
	in.Class.Refusable = true
	in.Decode[0].QueueTokens = 0
	assert.Equal(t, decide.DecodeAlone, decided(p, in).Action, "one can")
	in.Class.TTFT = time.Minute
	assert.NotEqual(t, decide.Refuse, decided(p, in).Action, "the class's objective is wider")
}

func TestWithoutSpeedsNothingIsPredicted(t *testing.T) {
	in := fleet(4000)
	for i := range 2 {
		in.Prefill[i].Speed, in.Decode[i].Speed = decide.Speed{}, decide.Speed{}
	}
	assert.Equal(t, decide.Decision{Prefill: decide.Any, Decode: decide.Any, Reason: decide.ReasonUnknown},
		decided(decide.Predicted(decide.PredictedOptions{}), in))
}

// wild is an input of any numbers, as a record of another version or a broken engine may have.
func wild(r *rand.Rand) *decide.Input {
	whole := func() int {
		return []int{0, 1, 100, 4000, 1 << 20, math.MaxInt32, -1, r.IntN(10_000)}[r.IntN(8)]
	}
	real := func() float64 {
		return []float64{0, 1e-9, 1e-5, 0.01, 10, math.Inf(1), math.NaN(), -1}[r.IntN(8)]
	}
	candidates := func() []decide.Candidate {
		all := make([]decide.Candidate, r.IntN(70))
		for i := range all {
			all[i] = decide.Candidate{Queue: whole(), QueueTokens: whole(), Running: whole(), Context: whole(),
				KV: decide.Memory{Free: whole(), Total: whole()}, Age: time.Duration(whole()), Cached: whole(),
				CachedExact: r.IntN(2) > 0, Alone: r.IntN(2) > 0, Apart: r.Uint64(),
				Speed: decide.Speed{Base: real(), PerRequest: real(), PerContext: real(), PerPrompt: real()}}
		}
		return all
	}
	return &decide.Input{Prompt: whole(), Exact: r.IntN(2) > 0, Limit: whole(), TokenBytes: whole(), Link: real(),
		Class:   decide.Class{TTFT: time.Duration(whole()), ITL: time.Duration(whole()), Refusable: r.IntN(2) > 0},
		Prefill: candidates(), Decode: candidates(), Rand: r.Uint64()}
}

func TestWhatIsDecidedCanBeDoneWhateverTheFigures(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	policies := []decide.Policy{decide.Always(), decide.Never(), decide.Threshold(1000, 100),
		decide.Predicted(decide.PredictedOptions{})}
	policies = append(policies, decide.Chain(policies[2], policies[3]))
	seen := map[decide.Action]int{}
	for range 20_000 {
		in := wild(r)
		for _, p := range policies {
			got := decided(p, in)
			assert.Equal(t, got, decided(p, in), "the same input gives the same decision")
			seen[got.Action]++
			assert.Less(t, got.Prefill, min(len(in.Prefill), decide.CandidatesMost))
			assert.Less(t, got.Decode, min(len(in.Decode), decide.CandidatesMost))
			switch {
			case got.Action == decide.DecodeAlone && got.Decode != decide.Any:
				assert.True(t, in.Decode[got.Decode].Alone)
			case got.Action == decide.PrefillAlone:
				assert.True(t, in.Prefill[got.Prefill].Alone)
			case got.Action == decide.Split && got.Decode != decide.Any:
				assert.Zero(t, in.Decode[got.Decode].Apart>>got.Prefill&1)
			case got.Action == decide.Refuse:
				assert.True(t, in.Class.Refusable)
				assert.GreaterOrEqual(t, got.RetryAfter, time.Second)
			}
			assert.GreaterOrEqual(t, got.TTFT, time.Duration(0))
		}
		if t.Failed() {
			return
		}
	}
	assert.Len(t, seen, 5)
}

func TestMoreLoadNeverPredictsLess(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	p := decide.Predicted(decide.PredictedOptions{})
	for range 2000 {
		in := &decide.Input{Prompt: 1 + r.IntN(20_000), Exact: true, TokenBytes: 131_072, Link: 1e9 * (1 + r.Float64()),
			Prefill: []decide.Candidate{{Speed: h100, QueueTokens: 1 + r.IntN(50_000)}},
			Decode:  []decide.Candidate{{Speed: h100, Running: r.IntN(100), Context: r.IntN(200_000)}}}
		before := decided(p, in)
		for name, change := range map[string]func(*decide.Input){
			"queue":   func(in *decide.Input) { in.Prefill[0].QueueTokens += 1000 },
			"prompt":  func(in *decide.Input) { in.Prompt += 100 },
			"running": func(in *decide.Input) { in.Decode[0].Running++ },
			"context": func(in *decide.Input) { in.Decode[0].Context += 1000 },
			"link":    func(in *decide.Input) { in.Link /= 2 },
			"slower":  func(in *decide.Input) { in.Prefill[0].Speed.PerPrompt *= 2 },
		} {
			more := *in
			more.Prefill, more.Decode = slices.Clone(in.Prefill), slices.Clone(in.Decode)
			change(&more)
			after := decided(p, &more)
			assert.GreaterOrEqual(t, after.TTFT, before.TTFT, name)
			assert.GreaterOrEqual(t, after.ITL, before.ITL, name)
		}
	}
}

// eight is a full input: eight engines a side.
func eight() *decide.Input {
	in := fleet(3000)
	for i := range 6 {
		in.Prefill = append(in.Prefill, decide.Candidate{Speed: h100, QueueTokens: 1000 * i, Cached: 100 * i})
		in.Decode = append(in.Decode, decide.Candidate{Speed: h100, Running: 10 + i, Context: 20_000, Alone: true})
	}
	return in
}

func TestADecisionAllocatesNothing(t *testing.T) {
	in, out := eight(), decide.Decision{}
	for name, p := range map[string]decide.Policy{"threshold": decide.Threshold(1024, 64),
		"predicted": decide.Predicted(decide.PredictedOptions{}),
		"chain":     decide.Chain(decide.Threshold(1024, 64), decide.Predicted(decide.PredictedOptions{}))} {
		assert.Zero(t, testing.AllocsPerRun(100, func() { p.Decide(in, &out) }), name)
	}
}

// BenchmarkDecide is one decision among eight engines a side.
func BenchmarkDecide(b *testing.B) {
	for name, p := range map[string]decide.Policy{"always": decide.Always(), "threshold": decide.Threshold(1024, 64),
		"predicted": decide.Predicted(decide.PredictedOptions{})} {
		b.Run(name, func(b *testing.B) {
			in, out := eight(), decide.Decision{}
			b.ReportAllocs()
			for b.Loop() {
				in.Rand++
				p.Decide(in, &out)
			}
		})
	}
}
