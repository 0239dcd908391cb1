// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"errors"
	"iter"
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
	r, err := ReadRecorded(&record.Header{Share: share, Policy: mode}, read(kept), 1)
	require.NoError(t, err)
	return r, played(out, objective)
}

func read(all []*record.Entry) iter.Seq2[*record.Entry, error] {
	return func(yield func(*record.Entry, error) bool) {
		for _, e := range all {
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

func TestWhatARecordingLacksIsSaid(t *testing.T) {
	entry := func() *record.Entry {
		c := []decide.Candidate{{Speed: decide.Speed{Base: .01, PerPrompt: 1e-4}, Alone: true}}
		in := decide.Input{Prompt: 100, Prefill: c, Decode: c}
		return &record.Entry{Recorded: decide.Recorded{Input: in, Result: decide.Result{Output: 9}}}
	}
	for says, change := range map[string]func(*record.Header, *record.Entry){
		"share":    func(h *record.Header, _ *record.Entry) { h.Share = 0 },
		"mode":     func(h *record.Header, _ *record.Entry) { h.Policy.Mode = "guess" },
		"how fast": func(_ *record.Header, e *record.Entry) { e.Input.Prefill = nil },
		"length":   func(_ *record.Header, e *record.Entry) { e.Result.Output = 0 },
	} {
		h, e := &record.Header{Share: 1}, entry()
		change(h, e)
		_, err := ReadRecorded(h, read([]*record.Entry{e}), 1)
		require.ErrorContains(t, err, says)
	}
	_, err := ReadRecorded(&record.Header{Share: 1}, read(nil), 1)
	require.ErrorContains(t, err, "no decisions")
	_, err = ReadRecorded(&record.Header{Share: 1}, func(yield func(*record.Entry, error) bool) {
		yield(nil, errors.New("line 3"))
	}, 1)
	require.ErrorContains(t, err, "line 3")
}
