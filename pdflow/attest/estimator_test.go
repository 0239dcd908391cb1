// SPDX-License-Identifier: Apache-2.0

package attest_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/attest"
)

// Of 20 fleets of 8 P and 8 D with one fault each, at least 19 find it in time, and none names another.
func TestAFaultIsNamedInTime(t *testing.T) {
	for _, c := range []struct {
		rate   float64
		kind   string
		within int
	}{
		{1, "prefill engine", 100}, {1, "decode engine", 100}, {1, "pair", 100},
		{0.01, "prefill engine", 5000}, {0.01, "decode engine", 5000},
		// nobody can do it sooner: a pair of 64 has a 64th of the probes, and shows in one of 6,400
		{0.01, "pair", 40_000},
	} {
		good := 0
		for seed := range uint64(20) {
			f := newFleet(1000+seed, 8, 8, attest.EstimatorOptions{})
			s := kinds[c.kind](f)
			f.faults[s] = c.rate
			if named := f.until(c.within); len(named) > 0 {
				assert.Equal(t, s, named[0].Suspect, "%s, rate %v, seed %d", c.kind, c.rate, seed)
				good++
			}
		}
		assert.GreaterOrEqual(t, good, 19, "%s, rate %v", c.kind, c.rate)
	}
}

func TestNothingIsNamedInACleanFleet(t *testing.T) {
	for _, noise := range []float64{0, 1e-4} { // the second is the share of wrong probes that the estimator expects
		for seed := range uint64(3) {
			f := newFleet(seed, 8, 8, attest.EstimatorOptions{})
			f.noise = noise
			assert.Empty(t, f.until(100_000), "noise %v", noise)
		}
	}
}

func TestNoiseThatIsToldNamesNobody(t *testing.T) {
	f := newFleet(1, 8, 8, attest.EstimatorOptions{Noise: 0.01})
	f.noise = 0.01
	assert.Empty(t, f.until(20_000))

	f = newFleet(1, 8, 8, attest.EstimatorOptions{Noise: 0.01})
	f.noise = 0.01
	s := kinds["decode engine"](f)
	f.faults[s] = 1
	named := f.until(100)
	require.Len(t, named, 1)
	assert.Equal(t, s, named[0].Suspect)
}

// What was right for long is not trusted for ever.
func TestAFaultThatBeginsLateIsNamedSoon(t *testing.T) {
	for kind, draw := range kinds {
		for seed := range uint64(20) {
			f := newFleet(seed, 8, 8, attest.EstimatorOptions{})
			require.Empty(t, f.until(20_000))
			s := draw(f)
			f.faults[s] = 1
			named := f.until(160)
			require.Len(t, named, 1, "%s, seed %d", kind, seed)
			require.Equal(t, s, named[0].Suspect)
		}
	}
}

func TestSeveralFaultsAreNamedEach(t *testing.T) {
	for name, faults := range map[string][]attest.Suspect{
		"two decode engines": {{Decode: "d1"}, {Decode: "d5"}},
		"P and D":            {{Prefill: "p2"}, {Decode: "d3"}},
		"P and a pair":       {{Prefill: "p2"}, {Prefill: "p4", Decode: "d4"}},
		"three pairs": {{Prefill: "p1", Decode: "d4"}, {Prefill: "p2", Decode: "d4"},
			{Prefill: "p4", Decode: "d6"}},
		"half of a role": {{Prefill: "p0"}, {Prefill: "p1"}, {Prefill: "p2"}, {Prefill: "p3"}},
	} {
		for seed := range uint64(20) {
			f := newFleet(seed, 8, 8, attest.EstimatorOptions{})
			for _, s := range faults {
				f.faults[s] = 1
			}
			for range 1500 { // half of a role at fault may look like a D at first, which is acquitted later
				f.probe()
			}
			var named []attest.Suspect
			for _, x := range f.Named() {
				named = append(named, x.Suspect)
			}
			assert.ElementsMatch(t, faults, named, "%s, seed %d", name, seed)
		}
	}
}

// A fault that ended is acquitted by right probes in a row, and one that goes on is not.
func TestWhatCorruptsNoMoreIsReleased(t *testing.T) {
	for kind, draw := range kinds {
		f := newFleet(3, 8, 8, attest.EstimatorOptions{})
		s := draw(f)
		f.faults[s] = 1
		require.Len(t, f.until(200), 1)
		for range 1000 {
			_, released := f.probe()
			require.Empty(t, released, kind)
		}
		delete(f.faults, s)
		for range 400 { // every eighth probe asks for it
			if _, released := f.probe(); len(released) > 0 {
				require.Equal(t, s, released[0].Suspect)
				require.Empty(t, f.Named())
				break
			}
		}
		require.Empty(t, f.Named(), kind)
		require.Empty(t, f.until(1000), "its old results are forgotten")
		f.faults[s] = 1
		require.Len(t, f.until(160), 1, "and it is named again")
	}
}

// With one engine of a role, the pair and the other engine look alike: the engine is named, since it is in all pairs.
func TestSmallFleets(t *testing.T) {
	for _, size := range [][2]int{{2, 2}, {2, 8}, {3, 2}} {
		for kind, draw := range kinds {
			f := newFleet(1, size[0], size[1], attest.EstimatorOptions{})
			s := draw(f)
			f.faults[s] = 1
			named := f.until(100)
			require.Len(t, named, 1, "%v, %s", size, kind)
			require.Equal(t, s, named[0].Suspect, "%v, %s", size, kind)
		}
	}
	f := newFleet(1, 1, 3, attest.EstimatorOptions{})
	f.faults[attest.Suspect{Prefill: "p0"}] = 1
	require.Equal(t, attest.Suspect{Prefill: "p0"}, f.until(100)[0].Suspect)
	f = newFleet(1, 1, 1, attest.EstimatorOptions{})
	f.faults[attest.Suspect{Prefill: "p0"}] = 1
	require.Empty(t, f.until(1000), "nothing tells P, D and the pair apart")
	require.NotEmpty(t, f.Suspects())
	f = newFleet(1, 0, 3, attest.EstimatorOptions{})
	_, _, ok := f.Next()
	require.False(t, ok)
}

func TestTheSurveyGoesThroughAllPairs(t *testing.T) {
	for _, size := range [][2]int{{8, 8}, {2, 4}, {2, 3}, {3, 2}, {1, 5}, {5, 1}, {4, 6}} {
		f := newFleet(1, size[0], size[1], attest.EstimatorOptions{})
		seen := map[attest.Suspect]int{}
		for i := range size[0] * size[1] {
			p, d, ok := f.Next()
			require.True(t, ok)
			f.Record(p, d, true)
			seen[attest.Suspect{Prefill: p, Decode: d}]++
			if i == max(size[0], size[1])-1 {
				ps, ds := map[string]bool{}, map[string]bool{}
				for s := range seen {
					ps[s.Prefill], ds[s.Decode] = true, true
				}
				require.Len(t, ps, size[0], "one round asks every engine")
				require.Len(t, ds, size[1])
			}
		}
		require.Len(t, seen, size[0]*size[1], "%v", size)
	}
}

func TestOnlyPairsThatFitAreProbed(t *testing.T) {
	f := newFleet(1, 4, 4, attest.EstimatorOptions{})
	f.SetFleet([]string{"p0", "p1", "x"}, []string{"d0", "x", "d1"}, func(p, d string) bool { return p[1:] == d[1:] })
	f.faults[attest.Suspect{Prefill: "p0"}] = 1
	for range 300 {
		p, d, ok := f.Next()
		require.True(t, ok)
		require.Equal(t, p[1:], d[1:])
		require.NotEqual(t, "x", p, "an engine forms no pair with itself")
		f.Record(p, d, p != "p0")
	}
}

func TestEnginesThatLeftAreForgotten(t *testing.T) {
	f := newFleet(1, 4, 4, attest.EstimatorOptions{})
	f.faults[attest.Suspect{Prefill: "p0"}] = 1
	require.Len(t, f.until(100), 1)
	f.SetFleet([]string{"p1", "p2", "p3"}, f.decodes, nil)
	require.Empty(t, f.Named())
	require.Empty(t, f.until(1000))
}
