// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"errors"
	"iter"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/enginesim/virtual"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/decide/record"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// taken is a run in virtual time that was recorded as a gateway does it. Only families of prompts are that keep
// accepts.
func taken(
	t *testing.T, f Fleet, trace *Trace, mode record.Spec, share float64, keep func(family uint64) bool,
) (*Recorded, Shown) {
	t.Helper()
	policy, err := mode.Policy()
	require.NoError(t, err)
	var entries []*record.Entry
	by := deciding(policy)
	by.Policy = decide.Func(func(in *decide.Input, out *decide.Decision) {
		policy.Decide(in, out)
		e := &record.Entry{Recorded: decide.Recorded{Input: *in, Decision: *out, Attempt: 1}}
		e.Input.Prefill, e.Input.Decode = slices.Clone(in.Prefill), slices.Clone(in.Decode)
		for role, n := range [2]int{len(in.Prefill), len(in.Decode)} {
			for i := range n {
				e.Engines[role] = append(e.Engines[role], string("pd"[role])+strconv.Itoa(i))
			}
		}
		entries = append(entries, e)
	})
	out, err := decidedOn(t.Context(), f, trace, by, 1)
	require.NoError(t, err)
	require.Len(t, entries, trace.Requests())
	var kept []*record.Entry
	for i, e := range entries {
		o := &out.Outcomes[i]
		e.At = at(o.At).Sub(at(0))
		e.Result = decide.Result{TTFT: at(o.TTFT()).Sub(at(0)), ITL: at(o.TPOT()).Sub(at(0)), Output: o.Output,
			Cached: o.Reused}
		if o.Refused {
			e.Result = decide.Result{Error: "overloaded"}
		}
		e.Decode = "d"
		if o.Prefill >= 0 {
			e.Prefill = "p"
		}
		x, _, round := trace.at(i)
		keys, _ := prompt(x, round, f.PrefillSpec.BlockSize)
		for n := 1; n <= min(len(keys), e.Input.Prompt/f.PrefillSpec.BlockSize); n *= 2 {
			e.Prefixes = append(e.Prefixes, record.Prefix{Hash: keys[n-1], Tokens: n * f.PrefillSpec.BlockSize})
		}
		if keep == nil || keep(keys[0]) {
			kept = append(kept, e)
		}
	}
	slices.Reverse(kept) // they come in the order of their ends
	r, err := ReadRecorded(t.Context(), read(&record.Header{Share: share, Policy: mode}, kept), 1)
	require.NoError(t, err)
	return r, played(out, objective)
}

func read(h *record.Header, all []*record.Entry) iter.Seq2[*record.Entry, error] {
	return func(yield func(*record.Entry, error) bool) {
		for _, e := range all {
			e.Header = h
			if !yield(e, nil) {
				return
			}
		}
	}
}

var objective = SLO{TTFT: time.Second, TPOT: 25 * time.Millisecond}

func deciding(p decide.Policy) Deciding {
	return Deciding{Policy: p, Pick: pick.PrefixAffinity(), Class: decide.Class{TTFT: objective.TTFT,
		ITL: objective.TPOT}}
}

func played(out *virtual.Result, slo SLO) Shown {
	var all []shown
	for i := range out.Outcomes {
		o := &out.Outcomes[i]
		all = append(all, shown{ttft: o.TTFT(), itl: o.TPOT(), split: o.Prefill >= 0, refused: o.Refused})
	}
	return newShown(all, slo)
}

// busy is a fleet of four engines, a link that is slow, and conversations.
func busy(t *testing.T) (Fleet, *Trace) {
	t.Helper()
	f := UsualFleet()
	f.Prefill, f.Decode, f.Zones, f.Handshake = 2, 2, 1, 0
	f.PrefillSpec.StepTokens, f.DecodeSpec.StepTokens = usualStep, usualStep
	f.Link = model.Link{BytesPerSecond: 2e9}
	g := Usual()
	g.Rate, g.Seconds = 5, 15
	trace, err := g.Trace(3)
	require.NoError(t, err)
	return f, trace
}

// That many requests begin with the same message of the system makes reading them no slower for each.
func TestManyRequestsWithOneBeginningAreReadInTime(t *testing.T) {
	took := func(hash func(i int) uint64) time.Duration {
		all := make([]*record.Entry, 40_000)
		for i := range all {
			in := decide.Input{Prompt: 2000 + i%4000, Decode: []decide.Candidate{{Cached: 512}}}
			in.Prefill = []decide.Candidate{{Speed: decide.Speed{Base: .01, PerPrompt: 1e-5}}}
			in.Decode[0].Speed = in.Prefill[0].Speed
			all[i] = &record.Entry{At: time.Duration(i) * time.Millisecond, Recorded: decide.Recorded{Input: in,
				Result: decide.Result{Output: 100}}, Prefixes: []record.Prefix{{Hash: hash(i), Tokens: 512}}}
		}
		begun := time.Now()
		_, err := ReadRecorded(t.Context(), read(&record.Header{Share: 1, Policy: record.Spec{Mode: "never"}}, all), 1)
		require.NoError(t, err)
		return time.Since(begun)
	}
	own := took(func(i int) uint64 { return uint64(i) })
	assert.Less(t, took(func(int) uint64 { return 1 }), 8*own+100*time.Millisecond)
}

func TestAReplayOfTheRecordedSetUpIsWhatWasRecorded(t *testing.T) {
	f, trace := busy(t)
	r, came := taken(t, f, trace, record.Spec{Mode: "threshold", UncachedTokens: 2048}, 1, nil)
	near(t, came, r.Came(objective), 1e-6)
	assert.Equal(t, trace.Requests(), r.Trace.Requests())
	assert.Equal(t, [2]int{2, 2}, [2]int{r.Fleet.Prefill, r.Fleet.Decode})
	require.NoError(t, r.Fit(t.Context(), 1))
	again, err := r.Replay(t.Context(), r.Fleet, r.By, objective, 1)
	require.NoError(t, err)
	near(t, came, again, .15)

	// What engines found in their caches is what they found then.
	before, err := decidedOn(t.Context(), f, trace, deciding(r.By.Policy), 1)
	require.NoError(t, err)
	after, err := decidedOn(t.Context(), r.Fleet, r.Trace, r.By, 1)
	require.NoError(t, err)
	was, is := 0, 0
	for i := range before.Outcomes {
		was, is = was+before.Outcomes[i].Reused, is+after.Outcomes[i].Reused
	}
	assert.InEpsilon(t, was, is, .02)
}

func near(t *testing.T, want, got Shown, off float64) {
	t.Helper()
	assert.InEpsilon(t, want.TTFTP50, got.TTFTP50, off, "TTFT p50")
	assert.InEpsilon(t, want.TTFTP99, got.TTFTP99, off, "TTFT p99")
	assert.InEpsilon(t, want.ITLP50, got.ITLP50, off, "ITL p50")
	assert.InEpsilon(t, want.ITLP99, got.ITLP99, off, "ITL p99")
	assert.InDelta(t, want.Goodput, got.Goodput, off, "goodput")
	assert.InDelta(t, want.Split, got.Split, off, "split")
}

func TestWhatIfTellsWhatAnotherSetUpWouldHaveDone(t *testing.T) {
	f, trace := busy(t)
	r, _ := taken(t, f, trace, record.Spec{Mode: "always"}, 1, nil)
	for name, x := range map[string]struct {
		prefill, decode int
		mode            record.Spec
	}{
		"ratio":     {1, 3, record.Spec{Mode: "always"}},
		"threshold": {2, 2, record.Spec{Mode: "threshold", UncachedTokens: 4096}},
	} {
		f.Prefill, f.Decode = x.prefill, x.decode
		_, came := taken(t, f, trace, x.mode, 1, nil)
		other, by := r.Fleet, r.By
		other.Prefill, other.Decode = x.prefill, x.decode
		var err error
		by.Policy, err = x.mode.Policy()
		require.NoError(t, err)
		told, err := r.Replay(t.Context(), other, by, objective, 1)
		require.NoError(t, err)
		t.Logf("%s\n%+v\n%+v", name, came, told)
		near(t, came, told, .25)
	}
}

// Of a quarter of the conversations the load is made again.
func TestASampleIsScaledUp(t *testing.T) {
	f, trace := busy(t)
	mode := record.Spec{Mode: "threshold", UncachedTokens: 2048}
	all, _ := taken(t, f, trace, mode, 1, nil)
	r, _ := taken(t, f, trace, mode, .25, func(family uint64) bool { return mix(family, 5)%4 == 0 })
	assert.InEpsilon(t, 4*len(r.came), r.Trace.Requests(), .01)
	assert.InDelta(t, all.Trace.entries[all.Trace.Requests()-1].At, r.Trace.entries[r.Trace.Requests()-1].At, 10)
	shared, own := 0, 0 // segments of copies
	for _, e := range r.Trace.entries {
		for _, s := range e.Segments {
			if strings.Contains(s.ID, "#") {
				own++
			} else {
				shared++
			}
		}
	}
	assert.Positive(t, own)
	assert.Greater(t, shared, r.Trace.Requests()/4, "what conversations have in common stays so")
}

func aDecision() *record.Entry {
	c := func() []decide.Candidate {
		return []decide.Candidate{{Speed: decide.Speed{Base: .01, PerPrompt: 1e-4}, Alone: true}}
	}
	in := decide.Input{Prompt: 100, Prefill: c(), Decode: c()}
	return &record.Entry{Recorded: decide.Recorded{Input: in, Result: decide.Result{Output: 9}}}
}

func TestWhatARecordingLacksIsSaid(t *testing.T) {
	for says, change := range map[string]func(*record.Header, *record.Entry){
		"share":    func(h *record.Header, _ *record.Entry) { h.Share = 0 },
		"mode":     func(h *record.Header, _ *record.Entry) { h.Policy.Mode = "guess" },
		"how fast": func(_ *record.Header, e *record.Entry) { e.Input.Prefill = nil },
		"length":   func(_ *record.Header, e *record.Entry) { e.Result.Output = 0 },
	} {
		h, e := &record.Header{Share: 1}, aDecision()
		change(h, e)
		_, err := ReadRecorded(t.Context(), read(h, []*record.Entry{e}), 1)
		require.ErrorContains(t, err, says)
	}
	_, err := ReadRecorded(t.Context(), read(nil, nil), 1)
	require.ErrorContains(t, err, "no decisions")
	_, err = ReadRecorded(t.Context(), func(yield func(*record.Entry, error) bool) {
		yield(nil, errors.New("line 3"))
	}, 1)
	require.ErrorContains(t, err, "line 3")
}

// A file may come from anybody.
func TestANumberThatNobodyCanHaveNamesItsLine(t *testing.T) {
	huge, nan := 1<<40, math.NaN()
	for what, change := range map[string]func(*record.Entry, *decide.Candidate){
		"prompt":            func(e *record.Entry, _ *decide.Candidate) { e.Input.Prompt = huge },
		"its prompt":        func(e *record.Entry, _ *decide.Candidate) { e.Input.Prompt = -1 },
		"response":          func(e *record.Entry, _ *decide.Candidate) { e.Result.Output = huge },
		"its cached":        func(e *record.Entry, _ *decide.Candidate) { e.Result.Cached = huge },
		"time":              func(e *record.Entry, _ *decide.Candidate) { e.At = math.MinInt64 },
		"its times":         func(e *record.Entry, _ *decide.Candidate) { e.Result.ITL = -1 },
		"times":             func(e *record.Entry, _ *decide.Candidate) { e.Result.TTFT = math.MaxInt64 },
		"objectives":        func(e *record.Entry, _ *decide.Candidate) { e.Input.Class.TTFT = -time.Hour },
		"of a token":        func(e *record.Entry, _ *decide.Candidate) { e.Input.TokenBytes = -1 },
		"link":              func(e *record.Entry, _ *decide.Candidate) { e.Input.Link = nan },
		"speed":             func(_ *record.Entry, c *decide.Candidate) { c.Speed.PerPrompt = 1e300 },
		"'s speed":          func(_ *record.Entry, c *decide.Candidate) { c.Speed.Base = nan },
		"an engine's speed": func(_ *record.Entry, c *decide.Candidate) { c.Speed.PerContext = -1e-9 },
		"memory":            func(_ *record.Entry, c *decide.Candidate) { c.KV.Total = huge },
		"'s memory":         func(_ *record.Entry, c *decide.Candidate) { c.KV.Total = -16 },
	} {
		e := aDecision()
		e.Line = 77
		change(e, &e.Input.Decode[0])
		_, err := ReadRecorded(t.Context(), read(&record.Header{Share: 1}, []*record.Entry{aDecision(), e}), 1)
		require.ErrorContains(t, err, "line 77 is beyond what is played: ")
		require.ErrorContains(t, err, what)
	}
	// What each decision may have, all together may not.
	var all []*record.Entry
	for i := range 3000 {
		e := aDecision()
		e.Input.Prompt, e.Input.Decode[0].KV.Total = promptLong, memoryMost
		e.At, e.Engines[1] = time.Duration(i)*time.Second, many(3)
		all = append(all, e)
	}
	_, err := ReadRecorded(t.Context(), read(&record.Header{Share: .01}, all), 1)
	require.ErrorContains(t, err, "take fewer files")
	_, err = ReadRecorded(t.Context(), read(&record.Header{Share: 1}, all[:3]), 1)
	require.ErrorContains(t, err, "take fewer engines")
	for _, e := range all {
		e.Input.Prompt, e.Input.Decode[0].KV.Total = 100, 0
	}
	all[0].Engines[1], all[len(all)-1].Engines[1] = many(5000), many(5000)
	_, err = ReadRecorded(t.Context(), read(&record.Header{Share: 1}, all), 1)
	require.ErrorContains(t, err, "5000 engines of one role")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = ReadRecorded(ctx, read(&record.Header{Share: 1}, all[1:9]), 1)
	require.ErrorIs(t, err, context.Canceled)
}

func many(n int) (ids []string) {
	for i := range n {
		ids = append(ids, "e"+strconv.Itoa(i))
	}
	return ids
}

// Files are on one line of time, whatever was done to the gateway's clock.
func TestAClockThatWasSetMovesNoFile(t *testing.T) {
	began := time.Unix(1e9, 0)
	header := func(recorder string, at, after time.Duration) *record.Header {
		return &record.Header{Share: 1, Recorder: recorder, Began: began.Add(at), After: after}
	}
	for name, c := range map[string]struct {
		second, third *record.Header
		want          []float64 // when the second decisions of each come, after the first of all
		setBack       int
	}{
		"not set": {header("a", 20*time.Second, 20*time.Second), header("b", time.Minute, 0),
			[]float64{10, 30, 70}, 0},
		"while it recorded": {header("a", -time.Hour, 20*time.Second), header("b", time.Minute, 0),
			[]float64{10, 30, 70}, 0},
		"while it was off": {header("b", -time.Hour, 0), header("b", 9*time.Hour, time.Minute),
			[]float64{10, 20, 80}, 1},
		"of an older pdkit": {header("", time.Minute, 0), header("", 30*time.Second, 0), []float64{10, 70, 80}, 1},
	} {
		r, err := ReadRecorded(t.Context(), func(yield func(*record.Entry, error) bool) {
			for _, h := range []*record.Header{header("a", 0, 0), c.second, c.third} {
				for _, at := range []time.Duration{0, 10 * time.Second} {
					e := aDecision()
					if e.Header, e.At = h, at; h.Recorder == "" && at == 0 {
						e.At = time.Second
					}
					yield(e, nil)
				}
			}
		}, 1)
		require.NoError(t, err)
		assert.Equal(t, c.setBack, r.SetBack, name)
		for i, at := range c.want {
			assert.InDelta(t, at, r.Trace.entries[2*i+1].At, 1e-9, "%s: %d", name, i)
		}
	}
}
