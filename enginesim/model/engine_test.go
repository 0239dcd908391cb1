// SPDX-License-Identifier: Apache-2.0

package model_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim/model"
)

// arrival is a request that comes at a time.
type arrival struct {
	at float64
	r  *model.Request
}

// times are when a request's tokens came.
type times struct{ first, end float64 }

// serve drives an engine through arrivals until it is idle. each is called after each time that something happened.
func serve(tb testing.TB, e *model.Engine, all []arrival, each func(now float64, events []model.Event)) map[int]times {
	tb.Helper()
	got := map[int]times{}
	read := func(now float64) {
		events := e.Advance(now)
		for _, ev := range events {
			x := got[ev.Request.ID]
			switch ev.Kind {
			case model.First:
				x.first = ev.At
			case model.Ended:
				x.end = ev.At
			default:
			}
			got[ev.Request.ID] = x
		}
		if each != nil {
			each(now, events)
		}
	}
	for _, a := range all {
		for at, ok := e.Next(); ok && at <= a.at; at, ok = e.Next() {
			read(at)
		}
		require.NoError(tb, e.Add(a.r, a.at))
	}
	for at, ok := e.Next(); ok; at, ok = e.Next() {
		read(at)
	}
	return got
}

func engine(tb testing.TB, spec model.Spec) *model.Engine {
	tb.Helper()
	e, err := model.New(spec)
	require.NoError(tb, err)
	return e
}

// small is an engine that soon runs out of memory.
func small() model.Spec {
	return model.Spec{
		StepTime: model.StepTime{Base: .005, PerRequest: 1e-4, PerContextToken: 1e-6,
			PerPrefillToken: 5e-5},
		StepTokens: 256, MaxRunning: 16, Blocks: 200, BlockSize: 16,
	}
}

// workload makes requests of conversations that share beginnings, at a mean rate.
func workload(seed uint64, n int, rate float64) []arrival {
	r := rand.New(rand.NewPCG(seed, 1))
	var all []arrival
	at := 0.0
	for i := range n {
		at += r.ExpFloat64() / rate
		q := &model.Request{ID: i, Prompt: 20 + r.IntN(600), Output: 1 + r.IntN(120)}
		group := uint64(r.IntN(8))
		for b := range q.Prompt / 16 {
			key := group<<32 | uint64(b+1)
			if b > 10 {
				key = uint64(i+100)<<32 | uint64(b+1) | 1<<63
			}
			q.Keys = append(q.Keys, key)
		}
		all = append(all, arrival{at, q})
	}
	return all
}

// An engine that serves one request at a time, each in the same time, is the queue M/D/1, whose mean wait is known.
// Waits of such a queue are so alike from one to the next that their mean needs millions of them: the engine has each
// wait of Lindley's recursion, request by request, and the recursion, which is a sum and a maximum, goes on alone until
// its mean is that of the formula.
func TestTheMeanWaitIsThatOfMD1(t *testing.T) {
	const service = .1
	for _, c := range []struct {
		rho          float64
		served, long int
	}{{.5, 20_000, 400_000}, {.8, 50_000, 2_000_000}, {.95, 100_000, 12_000_000}} {
		t.Run(fmt.Sprintf("load %.2f", c.rho), func(t *testing.T) {
			t.Parallel()
			e := engine(t, model.Spec{StepTime: model.StepTime{PerPrefillToken: service / 100}, MaxRunning: 1,
				BlockSize: 100, NoPrefixCache: true})
			r := rand.New(rand.NewPCG(7, 1))
			type coming struct{ at, wait float64 }
			var came []coming // those that have not ended; they end in the order in which they came
			longest := 0.0
			read := func(now float64) {
				for _, ev := range e.Advance(now) {
					if ev.Kind == model.Ended {
						require.InDelta(t, came[0].wait, ev.At-service-came[0].at, 1e-6, "as Lindley says")
						longest = max(longest, came[0].wait)
						came = came[1:]
					}
				}
			}
			at, wait, sum := 0.0, 0.0, 0.0
			for i := range c.long {
				gap := r.ExpFloat64() * service / c.rho
				if i > 0 {
					wait = max(0, wait+service-gap)
				}
				at += gap
				sum += wait
				if i >= c.served {
					continue
				}
				came = append(came, coming{at, wait})
				for next, ok := e.Next(); ok && next <= at; next, ok = e.Next() {
					read(next)
				}
				if err := e.Add(&model.Request{Prompt: 100, Output: 1}, at); err != nil {
					t.Fatal(err)
				}
			}
			for next, ok := e.Next(); ok; next, ok = e.Next() {
				read(next)
			}
			want, mean := c.rho/(2*(1-c.rho))*service, sum/float64(c.long)
			t.Logf("mean wait %.5f s, by formula %.5f s (%+.2f %%)", mean, want, 100*(mean/want-1))
			assert.InEpsilon(t, want, mean, .02)
			assert.Greater(t, longest, 3*want, "the engine was asked for waits that are long enough")
			assert.Equal(t, c.served, e.Stats().Ended)
			assert.InEpsilon(t, float64(c.served)*service, e.Stats().Busy, 1e-6, "work is conserved")
		})
	}
}

// A stretch of steps in one event gives the times that its steps give one by one, also where memory runs out.
func TestAStretchTakesTheTimeOfItsSteps(t *testing.T) {
	for seed := range uint64(20) {
		spec := small()
		switch seed % 4 {
		case 1:
			spec.Blocks = 60
		case 2:
			spec.NoChunks = true
		case 3:
			spec.NoPrefixCache, spec.StepTokens = true, 8
		}
		one, all := engine(t, spec), engine(t, spec)
		one.EachStep = true
		rate := .5 + float64(seed)
		want, got := serve(t, one, workload(seed, 300, rate), nil), serve(t, all, workload(seed, 300, rate), nil)
		require.Len(t, got, 300)
		for id, w := range want {
			require.InDelta(t, w.first, got[id].first, 1e-6, "seed %d, request %d", seed, id)
			require.InDelta(t, w.end, got[id].end, 1e-6, "seed %d, request %d", seed, id)
		}
		a, b := one.Stats(), all.Stats()
		require.InEpsilon(t, a.Busy, b.Busy, 1e-9)
		a.Busy, b.Busy = 0, 0
		require.Equal(t, a, b, "seed %d", seed)
		require.Equal(t, one.Gaps.Count(), all.Gaps.Count())
		for _, q := range []float64{.1, .5, .9, .99, 1} {
			require.InEpsilon(t, one.Gaps.Quantile(q), all.Gaps.Quantile(q), .02)
		}
	}
}

func TestWorkIsConservedAndMemoryIsNeverOver(t *testing.T) {
	for seed := range uint64(20) {
		spec := small()
		spec.Blocks = 50 + int(seed)*20
		e := engine(t, spec)
		all := workload(seed, 400, 3)
		work := workload(seed, 400, 3)
		preempted := 0
		serve(t, e, all, func(_ float64, events []model.Event) {
			require.LessOrEqual(t, e.UsedBlocks(), spec.Blocks)
			for _, ev := range events {
				if ev.Kind == model.Preempted {
					preempted++
				}
			}
		})
		s := e.Stats()
		prompts, outputs := 0, 0
		for _, a := range work {
			prompts, outputs = prompts+a.r.Prompt, outputs+a.r.Output
		}
		require.Equal(t, 400, s.Ended)
		require.Equal(t, outputs, s.Made, "each token is made once")
		require.Equal(t, preempted, s.Preemptions)
		if preempted == 0 {
			require.Equal(t, prompts, s.Computed+s.Reused, "each token of a prompt is computed or found")
		} else {
			require.Greater(t, s.Computed+s.Reused, prompts, "what was preempted is computed again")
		}
		require.Zero(t, e.UsedBlocks(), "an idle engine holds nothing")
		require.LessOrEqual(t, s.PeakBlocks, spec.Blocks)
		require.Positive(t, s.Reused)
		if seed == 0 {
			require.Positive(t, s.Preemptions, "the case must be there")
		}
	}
}

func TestNoTokenComesBeforeItsPrefillAndNoneIsFasterThanAStep(t *testing.T) {
	spec := small()
	spec.NoPrefixCache = true
	e := engine(t, spec)
	all := workload(3, 400, 3)
	got := serve(t, e, all, nil)
	for _, a := range all {
		least := spec.PerPrefillToken*float64(a.r.Prompt) + spec.Base
		require.GreaterOrEqual(t, got[a.r.ID].first-a.at, least)
		require.GreaterOrEqual(t, got[a.r.ID].end-got[a.r.ID].first, float64(a.r.Output-1)*spec.Base-1e-9)
	}
	require.GreaterOrEqual(t, e.Gaps.Quantile(0), spec.Base*.99)
}

func TestMoreLoadIsNeverFasterAndMoreCacheReusesMore(t *testing.T) {
	mean := func(rate float64, blocks int) (wait float64, reused int) {
		spec := small()
		spec.Blocks = blocks
		e := engine(t, spec)
		all := workload(5, 1500, rate)
		got := serve(t, e, all, nil)
		for _, a := range all {
			wait += (got[a.r.ID].first - a.at) / float64(len(all))
			reused += a.r.Reused()
		}
		return wait, reused
	}
	before := 0.0
	for _, rate := range []float64{.5, 1, 2, 4, 8, 16} {
		wait, _ := mean(rate, 200)
		require.Greater(t, wait, before, "rate %v", rate)
		before = wait
	}
	least, slowest := 0, math.Inf(1)
	for _, blocks := range []int{60, 120, 240, 480, 960} {
		wait, reused := mean(2, blocks)
		require.GreaterOrEqual(t, reused, least, "%d blocks", blocks)
		require.LessOrEqual(t, wait, slowest, "%d blocks", blocks)
		least, slowest = reused, wait
	}
}

// While a prompt is computed, the steps of those that decode take longer; the budget bounds by how much.
func TestPrefillSlowsDecodeDownByItsChunks(t *testing.T) {
	spec := small()
	spec.Blocks = 2000
	gap := func(chunk int, noChunks bool) float64 {
		spec.StepTokens, spec.NoChunks = chunk, noChunks
		e := engine(t, spec)
		serve(t, e, []arrival{{0, &model.Request{ID: 1, Prompt: 16, Output: 400}},
			{.5, &model.Request{ID: 2, Prompt: 4000, Output: 1}}}, nil)
		return e.Gaps.Quantile(1)
	}
	chunked := spec.Base + 256*spec.PerPrefillToken
	assert.InDelta(t, chunked, gap(256, false), .004)
	assert.InDelta(t, spec.Base+4000*spec.PerPrefillToken, gap(256, true), .01)
	assert.Less(t, gap(64, false), gap(256, false))
}

// Each token of a prompt attends to itself and to all before it, whatever the chunks are.
func TestTheAttentionOfAPromptGrowsWithTheSquareOfItsLength(t *testing.T) {
	for _, chunk := range []int{0, 64, 100} {
		e := engine(t, model.Spec{StepTime: model.StepTime{PerAttention: 1}, StepTokens: chunk, BlockSize: 16})
		keys := []uint64{1, 2, 3, 4}
		serve(t, e, []arrival{{0, &model.Request{ID: 1, Prompt: 300, Output: 5, Keys: keys}}}, nil)
		assert.InDelta(t, 300*301/2, e.Stats().Busy, 1e-6, "chunks of %d", chunk)
		serve(t, e, []arrival{{1e6, &model.Request{ID: 2, Prompt: 300, Output: 1, Keys: keys}}}, nil)
		assert.InDelta(t, 300*301-64*65/2, e.Stats().Busy, 1e-6, "what is cached is not computed")
	}
}

func TestKVFromElsewhereIsNotComputed(t *testing.T) {
	spec := small()
	e := engine(t, spec)
	keys := []uint64{1, 2, 3, 4}
	q := &model.Request{ID: 1, Prompt: 70, Output: 3, Keys: keys, Fetch: true}
	require.NoError(t, e.Add(q, 1))
	at, ok := e.Next()
	require.True(t, ok)
	require.InDelta(t, 1, at, 0)
	events := e.Advance(1)
	require.Equal(t, []model.Event{{Kind: model.Placed, At: 1, Request: q, Tokens: 70}}, events)
	require.Equal(t, 5, e.UsedBlocks(), "the blocks are there before the KV is")
	_, ok = e.Next()
	require.False(t, ok, "until it has come there is nothing to do")
	e.Loaded(q, 2)
	at, ok = e.Next()
	require.True(t, ok)
	require.InDelta(t, 2+spec.Seconds(model.Load{Requests: 1, ContextTokens: 69}), at, 1e-9)
	events = e.Advance(3)
	require.Equal(t, model.First, events[0].Kind)
	require.Equal(t, model.Ended, events[len(events)-1].Kind)

	again := &model.Request{ID: 2, Prompt: 70, Output: 1, Keys: keys, Fetch: true, Hold: true}
	require.NoError(t, e.Add(again, 4))
	require.Equal(t, 70-64, e.Advance(4)[0].Tokens, "what is cached is not fetched")
	e.Loaded(again, 4)
	require.Len(t, e.Advance(5), 2)
	require.Equal(t, 5, e.UsedBlocks(), "another engine reads them")
	e.Release(again, 6)
	require.Zero(t, e.UsedBlocks())
}

func TestARequestWhoseClientLeavesGivesItsBlocksBack(t *testing.T) {
	spec := small()
	spec.Blocks = 10
	e := engine(t, spec)
	a := &model.Request{ID: 1, Prompt: 100, Output: 50}
	b := &model.Request{ID: 2, Prompt: 100, Output: 5}
	require.NoError(t, e.Add(a, 0))
	require.NoError(t, e.Add(b, 0))
	e.Advance(.02)
	require.Equal(t, 1, e.Waiting())
	e.Remove(a, .03)
	at, _ := e.Next()
	require.Less(t, at, .04, "the step that runs is not interrupted, and no other follows")
	for ok := true; ok; at, ok = e.Next() {
		for _, ev := range e.Advance(at) {
			require.Equal(t, 2, ev.Request.ID)
		}
	}
	require.Zero(t, e.UsedBlocks())
	require.Equal(t, 1, e.Stats().Ended)
	require.ErrorIs(t, e.Add(&model.Request{Prompt: 160, Output: 2}, 9), model.ErrTooLong)
	require.Error(t, e.Add(&model.Request{Output: 2}, 9))
}

func TestAStepComputesNoMoreTokensThanItsBudget(t *testing.T) {
	e := engine(t, model.Spec{StepTime: model.StepTime{PerRequest: 1}, StepTokens: 2, BlockSize: 16})
	var all []arrival
	for i := range 4 {
		all = append(all, arrival{0, &model.Request{ID: i, Prompt: 1, Output: 5}})
	}
	serve(t, e, all, nil)
	assert.InDelta(t, 20, e.Stats().Busy, 1e-9, "a request that gets no token is in no step")
	assert.GreaterOrEqual(t, e.Stats().Steps, 10)
}

// Others share a prompt's beginning, not its end: the end is evicted first.
func TestTheEndOfAPromptIsEvictedFirst(t *testing.T) {
	spec := small()
	spec.Blocks = 10
	e := engine(t, spec)
	keys := []uint64{11, 12, 13, 14, 15, 16, 17, 18}
	serve(t, e, []arrival{{0, &model.Request{ID: 1, Prompt: 128, Output: 1, Keys: keys}},
		{1, &model.Request{ID: 2, Prompt: 96, Output: 1}}}, nil)
	assert.Equal(t, 64, e.Known(keys), "two blocks were unused, and four are gone")
}

func BenchmarkEngine(b *testing.B) {
	spec := model.Llama8B()
	for b.Loop() {
		e := engine(b, spec)
		serve(b, e, workload(1, 1000, 20), nil)
	}
}

// A request that fetches waits, and is told apart.
func TestRequestsThatFetchAreTold(t *testing.T) {
	e := engine(t, small())
	a := &model.Request{ID: 1, Prompt: 32, Output: 2, Fetch: true}
	b := &model.Request{ID: 2, Prompt: 32, Output: 2, Fetch: true}
	require.NoError(t, e.Add(a, 0))
	require.NoError(t, e.Add(b, 0))
	e.Advance(0)
	told := func() [3]int { g := e.Gauges(); return [3]int{g.Running, g.Waiting, g.Fetching} }
	assert.Equal(t, [3]int{0, 2, 2}, told())
	e.Remove(b, 0)
	assert.Equal(t, [3]int{0, 1, 1}, told())
	e.Loaded(a, 0)
	assert.Equal(t, [3]int{1, 0, 0}, told())
}
