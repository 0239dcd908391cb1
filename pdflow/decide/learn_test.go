// SPDX-License-Identifier: Apache-2.0

package decide_test

import (
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// world is what engines really take.
type world struct {
	overhead           time.Duration // of a prefill leg
	perPrompt, perSent time.Duration // for a token: computed, and transferred
	step               time.Duration
	slow               string // an engine that takes a second more
}

// serve plays one request, by the picker's own clock, and returns how long its first token took.
func (w *world) serve(t *testing.T, p pdflow.Picker, tokens int) (x pdflow.Pick, ttft time.Duration) {
	t.Helper()
	ids := "[" + strings.TrimSuffix(strings.Repeat("1,", tokens), ",") + "]"
	in := &pdflow.PickInput{Request: completion(t, ids), Attempt: 1}
	at := time.Now()
	x = mustPick(t, p, in)
	o := &pdflow.Outcome{Session: &connector.Session{Request: in.Request}, Mode: pdflow.ModeAggregated,
		Usage: pdflow.Usage{Output: 11}}
	compute := w.overhead + time.Duration(tokens)*w.perPrompt
	if w.slow != "" && (w.slow == x.Decode.ID || w.slow == x.Prefill.ID) {
		compute += time.Second
	}
	if x.Prefill.URL != nil {
		o.Prefill.Start = time.Now()
		time.Sleep(compute)
		o.Prefill.End = time.Now()
		x.PrefillDone(&o.Prefill)
		time.Sleep(time.Duration(tokens)*w.perSent + w.step)
	} else {
		time.Sleep(compute)
	}
	o.Decode.Start, o.Decode.FirstByte = at, time.Now()
	ttft = time.Since(at)
	time.Sleep(10 * w.step)
	o.Decode.End = time.Now()
	x.Done(o)
	return x, ttft
}

func TestSpeedsAreLearntFromWhatRequestsTook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		policy := &spy{Policy: decide.Always()}
		p := around(t, newSet(t, engines(2, "")...), policy, nil)
		w := &world{overhead: 5 * time.Millisecond, perPrompt: 30 * time.Microsecond, perSent: 2 * time.Microsecond,
			step: 10 * time.Millisecond}
		r := rand.New(rand.NewPCG(1, 1))
		for range 120 {
			w.serve(t, p, 100+r.IntN(2000))
		}
		in := policy.last()
		for _, c := range in.Prefill {
			assert.InEpsilon(t, 30e-6, c.Speed.PerPrompt, 0.05)
			assert.InEpsilon(t, 5e-3, c.Speed.Base, 0.3)
		}
		for _, c := range in.Decode {
			assert.InEpsilon(t, 10e-3, c.Speed.Base, 0.05)
			assert.InEpsilon(t, 30e-6, c.Speed.PerPrompt, 0.05, "of engines like it, until it has prefilled itself")
		}
		assert.InEpsilon(t, 2e-6, float64(in.TokenBytes)/in.Link, 0.1)
	})
}

func TestPredictionsAreComparedAndWrongOnesCountForNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set := newSet(t, engines(2, "")...)
		outer, err := decide.New(pick.New(set, pick.TwoChoices(), pick.WithCandidates()),
			decide.Chain(decide.Threshold(500, 0), decide.Predicted(decide.PredictedOptions{})), nil)
		require.NoError(t, err)
		p := outer.Bind(nil, anyAlone)
		w := &world{overhead: 5 * time.Millisecond, perPrompt: 30 * time.Microsecond, perSent: time.Microsecond,
			step: 10 * time.Millisecond}
		r := rand.New(rand.NewPCG(2, 2))
		run := func(n int) (last pdflow.Pick) {
			for range n {
				last, _ = w.serve(t, p, 1000+r.IntN(2000))
			}
			return last
		}
		run(60)
		good := outer.State()
		assert.Less(t, good.TTFTError, 0.25)
		assert.Less(t, good.ITLError, 0.25)
		assert.Positive(t, good.TTFTError)
		assert.False(t, good.Doubtful)
		x, _ := w.serve(t, p, 100)
		assert.Equal(t, decide.ReasonShort, x.Reason)

		w.perPrompt *= 30 // another model, or a broken clock
		for range 100 {
			if run(1); outer.State().Doubtful {
				break
			}
		}
		require.True(t, outer.State().Doubtful)
		x, _ = w.serve(t, p, 2000)
		assert.NotNil(t, x.Prefill.URL, "as if there were no policy")
		assert.Equal(t, "doubtful", x.Reason)
		x, _ = w.serve(t, p, 100)
		assert.Nil(t, x.Prefill.URL)
		assert.Equal(t, decide.ReasonShort, x.Reason, "a threshold predicts nothing")

		for range 1000 { // what is predicted is compared all the same
			if run(1); !outer.State().Doubtful {
				break
			}
		}
		assert.False(t, outer.State().Doubtful)
		x, _ = w.serve(t, p, 100)
		assert.Equal(t, decide.ReasonShort, x.Reason)
		require.NoError(t, outer.Close())
	})
}

func TestDecisionsAreCountedOnceTheirAttemptHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, dry := range []bool{false, true} {
			outer, err := decide.New(pick.New(newSet(t, engines(2, "")...), pick.TwoChoices(), pick.WithCandidates()),
				decide.Threshold(500, 0), &decide.Options{DryRun: dry})
			require.NoError(t, err)
			p := outer.Bind(nil, anyAlone)
			w := &world{step: time.Millisecond}
			w.serve(t, p, 100)
			w.serve(t, p, 100)
			w.serve(t, p, 1000)
			given := mustPick(t, p, &pdflow.PickInput{})
			given.Done(&pdflow.Outcome{Err: &pdflow.Error{Code: pdflow.CodeOverloaded}}) // given back
			given = mustPick(t, p, &pdflow.PickInput{})
			given.Done(&pdflow.Outcome{Session: &connector.Session{}, // by a flow
				Err: &pdflow.Error{Code: pdflow.CodeCanceled}})
			assert.ElementsMatch(t, []decide.Count{{Action: decide.DecodeAlone, Reason: decide.ReasonShort, N: 2},
				{Action: decide.Undecided, N: 1}}, outer.State().Decisions)
			require.NoError(t, outer.Close())
		}
	})
}

// What a host says of its engines' speed may be wrong: what requests took says by how much.
func TestTheHostsSpeedsAreCorrected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		policy := &spy{Policy: decide.Predicted(decide.PredictedOptions{})}
		p := around(t, newSet(t, engines(2, "")...), policy, &decide.Options{Engine: h100s,
			Class: func(*pdflow.PickInput) decide.Class { return decide.Class{ITL: 30 * time.Millisecond} }})
		for range 6 { // streams that run, for which prefill beside them would be too long
			if x := mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(40))}); x.PrefillDone != nil {
				x.PrefillDone(nil)
			}
		}
		w := &world{perPrompt: 2 * 31400 * time.Nanosecond, step: 3 * 6830 * time.Microsecond} // not those of h100
		r := rand.New(rand.NewPCG(1, 1))
		for range 60 {
			w.serve(t, p, 4000+r.IntN(4000))
		}
		for _, c := range policy.last().Decode {
			assert.InEpsilon(t, 3*h100.Base, c.Speed.Base, 0.2)
		}
		for _, c := range policy.last().Prefill {
			assert.InEpsilon(t, 2*h100.PerPrompt, c.Speed.PerPrompt, 0.1)
		}
	})
}

// KV that is to move counts until it has moved, by the speed of the link.
func TestKVThatIsToMoveCountsUntilItHasMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		policy := &spy{Policy: decide.Always()}
		p := around(t, newSet(t, engines(1, "")...), policy,
			&decide.Options{Engine: h100s, TokenBytes: 1000, Link: 100_000}) // 100 tokens a second
		in := &pdflow.PickInput{Request: completion(t, text(796))} // 200 tokens
		moving := func() [2]int {
			x := mustPick(t, p, in)
			x.PrefillDone(nil)
			x.Done(&pdflow.Outcome{Err: &pdflow.Error{}})
			return [2]int{policy.last().Prefill[0].Moving, policy.last().Decode[0].Moving}
		}
		first := mustPick(t, p, in)
		mustPick(t, p, in)
		assert.Equal(t, [2]int{200, 200}, [2]int{policy.last().Prefill[0].Moving, policy.last().Decode[0].Moving})
		first.PrefillDone(&pdflow.LegOutcome{})
		time.Sleep(time.Second)
		assert.Equal(t, [2]int{300, 300}, moving(), "half of the first, and the second, which is not computed yet")
	})
}

// A pick that is given back has cost its engines nothing, and neither has a prefill that failed.
func TestWhatIsGivenBackIsNoWork(t *testing.T) {
	gone := &pdflow.Error{Code: pdflow.CodeCanceled}
	for name, c := range map[string]struct {
		policy decide.Policy
		end    func(x *pdflow.Pick)
	}{
		"a pair": {policy: decide.Always(), end: func(x *pdflow.Pick) { x.Done(&pdflow.Outcome{Err: gone}) }},
		"a leg": {policy: decide.Always(), end: func(x *pdflow.Pick) {
			x.PrefillDone(nil)
			x.Done(&pdflow.Outcome{})
		}},
		"a prefill that failed": {policy: decide.Always(), end: func(x *pdflow.Pick) {
			x.PrefillDone(&pdflow.LegOutcome{Err: gone})
			x.Done(&pdflow.Outcome{Err: gone})
		}},
		"one engine": {policy: decide.Never(), end: func(x *pdflow.Pick) {
			time.Sleep(time.Millisecond)
			x.Done(&pdflow.Outcome{Err: gone})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				policy := &spy{Policy: c.policy}
				p := around(t, newSet(t, engines(1, "")...), policy,
					&decide.Options{TokenBytes: 1000, Link: 100_000}) // 100 tokens a second
				w := &world{overhead: time.Millisecond, perPrompt: time.Millisecond, step: time.Millisecond}
				for n := range 8 {
					w.serve(t, p, 50+n*20)
				}
				time.Sleep(time.Hour)
				in := &pdflow.PickInput{Request: completion(t, text(796)), Attempt: 1} // 200 tokens
				for range 10 {
					x := mustPick(t, p, in)
					c.end(&x)
				}
				mustPick(t, p, in)
				for _, y := range append(policy.last().Prefill, policy.last().Decode...) {
					assert.Zero(t, y.Moving)
					assert.Zero(t, y.QueueTokens)
					assert.InDelta(t, 0, y.Prefilled, 1e-9)
				}
				time.Sleep(time.Second)
				mustPick(t, p, in)
				if d := policy.last().Decode[0]; d.Running > 0 {
					assert.Positive(t, d.Prefilled, "what is served counts")
				}
			})
		})
	}
}
