// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

type score = func(in *pdflow.PickInput, p, d *discovery.Endpoint) float64

// prefers is a score of what is left of a pair's two names.
func prefers(scores map[string]float64) score {
	return func(_ *pdflow.PickInput, p, d *discovery.Endpoint) float64 {
		if p == nil {
			return scores["+"+d.ID]
		}
		return scores[p.ID+"+"+d.ID]
	}
}

func TestThePairWithTheHighestScoreServes(t *testing.T) {
	s := prefers(map[string]float64{"p1+d2": 3, "p2+d2": 2.5, "p2+d0": 2, "p0+d1": -1, "+d1": 1})
	p := pick.New(newFleet(t, many(3, 3)...).Set, pick.Score(s))
	for range 8 {
		require.Equal(t, "p1+d2", pair(t, p, &pdflow.PickInput{}))
		require.Equal(t, "+d1", pair(t, p, &pdflow.PickInput{Single: true}))
		require.Equal(t, "p2+d2", pair(t, p, &pdflow.PickInput{Avoid: []string{"p1"}}))
		require.Equal(t, "p2+d0", pair(t, p, &pdflow.PickInput{Avoid: []string{"d2"}}))
		require.Equal(t, "p2+d0", pair(t, p, &pdflow.PickInput{Decode: "d0"}))
		require.Equal(t, "p1+d2", pair(t, p, &pdflow.PickInput{Prefill: "p1"}))
		require.NotEqual(t, "p0+d1", pair(t, p, &pdflow.PickInput{Decode: "d1"}))
		require.Equal(t, "p2+d2", pair(t, p, &pdflow.PickInput{Avoid: []string{"d0", "d1", "d2", "p0", "p1"},
			Decode: "d2"}), "the function chooses the partner of an engine that has failed")
	}
}

// What a picker of one's own would have to obey is obeyed for it.
func TestAScoreDoesNotOverruleThePickersRules(t *testing.T) {
	loves := func(id string) score {
		return func(_ *pdflow.PickInput, p, d *discovery.Endpoint) float64 {
			if d.ID == id || p != nil && p.ID == id {
				return 1
			}
			return 0
		}
	}
	eps := []discovery.Endpoint{ep("p", prefill), ep("d", decode), ep("x", both), ep("y", both),
		ep("e", discovery.RoleEncode), ep("other", decode, "group=other"), ep("ill", decode)}
	f := newFleet(t, eps...)
	f.SetHealthy("ill", false)
	for id, c := range map[string]struct {
		in      pdflow.PickInput
		serving connector.Serving
	}{
		"other": {},
		"ill":   {},
		"p":     {in: pdflow.PickInput{Avoid: []string{"p"}}},
		"x":     {serving: pairOnly},
		"y":     {in: pdflow.PickInput{Single: true}, serving: connector.Serving{PrefillPairOnly: true}},
		"d":     {in: pdflow.PickInput{Single: true}, serving: pairOnly},
	} {
		p := pick.New(f.Set, pick.Score(loves(id))).Bind(nil, c.serving)
		for range 32 {
			x := mustPick(t, p, &c.in)
			require.NotEqual(t, id, x.Prefill.ID)
			require.NotEqual(t, id, x.Decode.ID)
			require.False(t, c.in.Single && x.Prefill.URL != nil)
		}
	}
	p := pick.New(f.Set, pick.Score(loves("p")))
	require.Equal(t, "e", mustPick(t, p, &pdflow.PickInput{Encode: 1}).Encode[0].ID)

	p = pick.New(f.Set, pick.Score(loves("d")))
	x := mustPick(t, p, &pdflow.PickInput{})
	x.Done(&pdflow.Outcome{Session: contract.NewSession(request(t, "x", 1), "", x.Prefill, x.Decode),
		Err: &pdflow.Error{Code: pdflow.CodeClientGone}, Orphan: true})
	for range 8 {
		y := mustPick(t, p, &pdflow.PickInput{})
		require.Equal(t, "d", y.Decode.ID)
		require.NotEqual(t, x.Prefill.ID, y.Prefill.ID, "this pair is in a cooldown")
	}
	require.NoError(t, p.Ready(&pdflow.PickInput{}), "it asks the set")
	require.Error(t, pick.New(newFleet(t, ep("p", prefill)).Set, pick.Score(nil)).Ready(&pdflow.PickInput{}))
}

func TestEqualScoresAreSpread(t *testing.T) {
	for name, s := range map[string]score{
		"none": nil,
		"NaN":  func(*pdflow.PickInput, *discovery.Endpoint, *discovery.Endpoint) float64 { return math.NaN() },
		"of one D": func(_ *pdflow.PickInput, _, d *discovery.Endpoint) float64 {
			return float64(strings.Index("d3 d2", d.ID)) // d3 is 0, d2 is 3, others are -1
		},
	} {
		for _, open := range []bool{false, true} {
			var first map[string]int
			for range 2 {
				p := pick.New(newFleet(t, many(4, 4, "dpSize=2")...).Set, pick.Score(s), pick.WithSeed(7))
				seen := map[string]int{}
				for range 320 {
					x := mustPick(t, p, &pdflow.PickInput{})
					seen[x.Prefill.ID+"+"+x.Decode.ID]++
					ranks := []discovery.Rank{discovery.RankOf(0), discovery.RankOf(1)}
					require.Contains(t, ranks, x.PrefillRank)
					require.Contains(t, ranks, x.DecodeRank)
					seen["rank "+map[bool]string{true: "0", false: "1"}[x.DecodeRank == ranks[0]]]++
					if !open {
						x.Done(&pdflow.Outcome{})
					}
				}
				if first == nil {
					first = seen
				}
				require.Equal(t, first, seen, "the seed says how")
			}
			pairs := 16
			if name == "of one D" {
				pairs = 4
				require.NotZero(t, first["p0+d2"])
			}
			require.Len(t, first, pairs+2, "%v", first)
			for what, n := range first {
				assert.Greater(t, n, 320/pairs/4, what)
			}
		}
	}
}

func TestNaNIsWorseThanAnyScore(t *testing.T) {
	for _, other := range []float64{math.Inf(1), 0, -math.MaxFloat64} {
		s := func(_ *pdflow.PickInput, p, d *discovery.Endpoint) float64 {
			if p.ID == "p1" && d.ID == "d1" {
				return other
			}
			return math.NaN()
		}
		p := pick.New(newFleet(t, many(3, 3)...).Set, pick.Score(s))
		for range 16 {
			require.Equal(t, "p1+d1", pair(t, p, &pdflow.PickInput{}))
		}
	}
}

// 64 engines of each role are all scored; of more, some others each time.
func TestAPickScoresABoundedNumberOfPairs(t *testing.T) {
	for _, n := range []int{64, 65, 300} {
		calls, seen := 0, map[string]bool{}
		s := func(_ *pdflow.PickInput, p, d *discovery.Endpoint) float64 {
			calls++
			seen[p.ID], seen[d.ID] = true, true
			return 0
		}
		p := pick.New(newFleet(t, many(n, n, "dpSize=2")...).Set, pick.Score(s))
		for i := 1; i <= 64; i++ {
			x := mustPick(t, p, &pdflow.PickInput{})
			x.Done(&pdflow.Outcome{})
			require.Equal(t, 64*64*i, calls)
			require.True(t, n > 64 || len(seen) == 2*n)
		}
		require.Len(t, seen, 2*n)
	}
}

func TestAPickByScoreAllocatesNothing(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector allocates")
	}
	p := pick.New(newFleet(t, many(16, 16, "dpSize=2")...).Set, pick.Score(nil))
	in, done := &pdflow.PickInput{}, &pdflow.Outcome{}
	once := func() { mustPick(t, p, in).Done(done) }
	once()
	assert.Zero(t, testing.AllocsPerRun(100, once))
}

func TestAScoreThatPanicsLeavesThePickerWhole(t *testing.T) {
	panics := true
	s := func(_ *pdflow.PickInput, p, d *discovery.Endpoint) float64 {
		if panics && d.ID == "d1" && p.ID == "p1" {
			panic("of the host")
		}
		return float64(len(p.ID + d.ID))
	}
	p := pick.New(newFleet(t, many(2, 2)...).Set, pick.Score(s))
	for range 4 {
		panics = true
		require.Panics(t, func() { _, _ = p.Pick(t.Context(), &pdflow.PickInput{}) })
		panics = false
		seen := map[string]bool{}
		for range 32 {
			x := mustPick(t, p, &pdflow.PickInput{})
			seen[x.Prefill.ID+x.Decode.ID] = true
			x.Done(&pdflow.Outcome{})
		}
		require.Len(t, seen, 4)
	}
}
