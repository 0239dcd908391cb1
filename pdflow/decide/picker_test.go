// SPDX-License-Identifier: Apache-2.0

package decide_test

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/admit"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/kvindex"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// spy keeps what a policy was asked.
type spy struct {
	decide.Policy
	in []decide.Input
}

func (s *spy) Decide(in *decide.Input, out *decide.Decision) {
	copied := *in
	copied.Prefill = append([]decide.Candidate{}, in.Prefill...)
	copied.Decode = append([]decide.Candidate{}, in.Decode...)
	s.in = append(s.in, copied)
	s.Policy.Decide(in, out)
}

func (s *spy) last() *decide.Input { return &s.in[len(s.in)-1] }

func TestAShortPromptStaysAtDecode(t *testing.T) {
	p := around(t, newSet(t, engines(2, "")...), decide.Threshold(100, 0), nil)
	x := mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(200))})
	assert.Nil(t, x.Prefill.URL)
	assert.Equal(t, discovery.RoleDecode, x.Decode.Role)
	assert.Equal(t, decide.ReasonShort, x.Reason)
	x = mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(2000))})
	assert.NotNil(t, x.Prefill.URL)
	assert.Empty(t, x.Reason)
}

func TestTokenIDsAreCountedAndTextIsEstimated(t *testing.T) {
	ids := func(n int) string { return "[" + strings.TrimSuffix(strings.Repeat("12, ", n), ", ") + "]" }
	for prompt, want := range map[string]decide.Input{
		ids(70):             {Prompt: 70, Exact: true},
		"[" + ids(70) + "]": {Prompt: 70, Exact: true},
		text(398):           {Prompt: 101},
		`["` + "one" + `"]`: {Prompt: 2},
		`[]`:                {Prompt: 1},
	} {
		policy := &spy{Policy: decide.Always()}
		p := around(t, newSet(t, engines(1, "")...), policy, nil)
		_, err := p.Pick(t.Context(), &pdflow.PickInput{Request: completion(t, prompt)})
		require.NoError(t, err)
		assert.Equal(t, want.Prompt, policy.last().Prompt, prompt)
		assert.Equal(t, want.Exact, policy.last().Exact, prompt)
	}
	r, err := connector.ParseRequest(connector.APIChat, []byte(`{"model":"m","messages":[{"role":"user","content":"`+
		strings.Repeat("w", 367)+`"}],"tools":[{"type":"function"}],"stream":true}`))
	require.NoError(t, err)
	policy := &spy{Policy: decide.Always()}
	mustPick(t, around(t, newSet(t, engines(1, "")...), policy, nil), &pdflow.PickInput{Request: r})
	assert.Equal(t, 105, policy.last().Prompt, "templates put the tools into the prompt")
	policy = &spy{Policy: decide.Always()}
	o := &decide.Options{Tokens: func(*pdflow.PickInput) (int, bool) { return 7, true }}
	mustPick(t, around(t, newSet(t, engines(1, "")...), policy, o), &pdflow.PickInput{Request: r})
	assert.Equal(t, 7, policy.last().Prompt, "a host that tokenizes knows better")
	mustPick(t, around(t, newSet(t, engines(1, "")...), policy, nil), &pdflow.PickInput{Request: r,
		Prompt: &pdflow.Prompt{IDs: make([]uint32, 90), Exact: true}})
	assert.Equal(t, 90, policy.last().Prompt, "the engines' tokenizer has told")
	assert.True(t, policy.last().Exact)
}

func TestAtMostEightEnginesOfARoleAreCandidates(t *testing.T) {
	policy := &spy{Policy: decide.Predicted(decide.PredictedOptions{})}
	p := around(t, newSet(t, engines(100, "")...), policy, &decide.Options{Engine: h100s})
	served := map[string]bool{}
	for range 300 {
		x := mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(8000))})
		assert.Len(t, policy.last().Prefill, 8)
		assert.Len(t, policy.last().Decode, 8)
		served[x.Prefill.ID] = true
	}
	delete(served, "") // an idle decode engine serves alone
	assert.Len(t, served, 100, "the least loaded are among them")
	policy = &spy{Policy: decide.Always()}
	mustPick(t, around(t, newSet(t, engines(3, "")...), policy, nil), &pdflow.PickInput{})
	assert.Len(t, policy.last().Prefill, 3)
}

func TestAnEngineThatFailedOrIsFullIsNoCandidate(t *testing.T) {
	policy := &spy{Policy: decide.Predicted(decide.PredictedOptions{})}
	p := around(t, newSet(t, engines(3, "")...), policy, &decide.Options{Engine: h100s})
	for _, in := range []pdflow.PickInput{{Avoid: []string{"p1", "d0"}},
		{Avoid: []string{"p1", "d0"}, Full: []string{"p1", "d0"}}} {
		for range 50 {
			x := mustPick(t, p, &in)
			assert.NotEqual(t, "p1", x.Prefill.ID)
			assert.NotEqual(t, "d0", x.Decode.ID)
			assert.Len(t, policy.last().Prefill, 2)
		}
	}
	asked := len(policy.in)
	x := mustPick(t, p, &pdflow.PickInput{Avoid: []string{"d0", "d1", "d2"}})
	assert.NotEmpty(t, x.Prefill.ID, "an engine that failed serves where there is no other")
	assert.Len(t, policy.in, asked, "nothing is left to decide")
	policy.Policy = decide.Always()
	x = mustPick(t, p, &pdflow.PickInput{Avoid: []string{"p0", "p1", "p2"}})
	assert.NotEmpty(t, x.Prefill.ID)
}

// A request that a decode engine is to serve alone needs no prefill engine that is good, or any.
func TestADecodeEngineServesAloneWherePrefillIsNot(t *testing.T) {
	short, long := completion(t, text(100)), completion(t, text(8000))
	both := []discovery.Endpoint{engine("d0", discovery.RoleDecode, ""), engine("b0", discovery.RoleBoth, "")}
	for name, c := range map[string]struct {
		engines []discovery.Endpoint
		policy  decide.Policy
		serving connector.Serving
		in      pdflow.PickInput
		want    string // the engine that serves alone; "": none does
	}{
		"never":            {policy: decide.Never(), in: pdflow.PickInput{Request: long}, want: "d0"},
		"a short prompt":   {policy: decide.Threshold(0, 100), in: pdflow.PickInput{Request: short}, want: "d0"},
		"a long prompt":    {policy: decide.Threshold(0, 100), in: pdflow.PickInput{Request: long}},
		"always":           {policy: decide.Always(), in: pdflow.PickInput{Request: short}},
		"decode is named":  {policy: decide.Never(), in: pdflow.PickInput{Request: long, Decode: "d0"}, want: "d0"},
		"prefill is named": {policy: decide.Never(), in: pdflow.PickInput{Request: long, Prefill: "p0"}},
		"an encode stage":  {policy: decide.Never(), in: pdflow.PickInput{Request: long, Encode: 1}},
		"pairs only":       {policy: decide.Never(), serving: connector.Serving{PairOnly: true}},
		"predicted": {policy: decide.Predicted(decide.PredictedOptions{}), in: pdflow.PickInput{Request: long},
			want: "d0"},
		"prefill dies of it": {policy: decide.Never(), serving: connector.Serving{PrefillPairOnly: true},
			engines: both, in: pdflow.PickInput{Request: long, Avoid: []string{"b0"}}, want: "d0"},
	} {
		for _, there := range []bool{false, true} {
			eps := c.engines
			if eps == nil {
				eps = []discovery.Endpoint{engine("d0", discovery.RoleDecode, "")}
			}
			in := c.in
			if there {
				eps = append([]discovery.Endpoint{engine("p0", discovery.RolePrefill, "")}, eps...)
				in.Avoid = append([]string{"p0"}, in.Avoid...)
			}
			for _, policy := range []pick.Policy{pick.TwoChoices(), pick.PrefixAffinity(), pick.LeastLoad()} {
				outer, err := decide.New(pick.New(newSet(t, eps...), policy, pick.WithCandidates()), c.policy,
					&decide.Options{Engine: h100s})
				require.NoError(t, err)
				x, err := outer.Bind(nil, c.serving).Pick(t.Context(), &in)
				if c.want == "" {
					assert.Equal(t, there, err == nil, name)
					assert.Equal(t, there, x.Prefill.URL != nil, name)
					continue
				}
				require.NoError(t, err, name)
				assert.Nil(t, x.Prefill.URL, name)
				assert.Equal(t, c.want, x.Decode.ID, name)
				assert.NotEmpty(t, x.Reason, name)
			}
		}
	}
}

func TestEnginesThatAreNamedStayAndOneEngineStaysOne(t *testing.T) {
	p := around(t, newSet(t, engines(4, "")...), decide.Predicted(decide.PredictedOptions{}),
		&decide.Options{Engine: h100s})
	for range 20 {
		x := mustPick(t, p, &pdflow.PickInput{Prefill: "p2", Decode: "d3"})
		assert.Equal(t, [2]string{"p2", "d3"}, [2]string{x.Prefill.ID, x.Decode.ID})
		x = mustPick(t, p, &pdflow.PickInput{Prefill: "p2"})
		assert.Equal(t, "p2", x.Prefill.ID)
		x = mustPick(t, p, &pdflow.PickInput{Decode: "d3"})
		assert.Equal(t, "d3", x.Decode.ID)
		x = mustPick(t, p, &pdflow.PickInput{Decode: "d1", Single: true})
		assert.Nil(t, x.Prefill.URL)
		assert.Equal(t, "d1", x.Decode.ID)
		assert.Empty(t, x.Reason)
	}
	_, err := p.Pick(t.Context(), &pdflow.PickInput{Decode: "gone"})
	require.ErrorIs(t, err, pdflow.CodeNotFound)
}

func TestADecodeEngineIsReadyAloneIfItServesEachRequest(t *testing.T) {
	for name, c := range map[string]struct {
		policy  decide.Policy
		role    discovery.Role
		serving connector.Serving
		o       decide.Options
		in      pdflow.PickInput
		ready   bool
	}{
		"never":      {policy: decide.Never(), role: discovery.RoleDecode, ready: true},
		"always":     {policy: decide.Always(), role: discovery.RoleDecode},
		"some":       {policy: decide.Threshold(1e6, 1e6), role: discovery.RoleDecode},
		"dry":        {policy: decide.Never(), role: discovery.RoleDecode, o: decide.Options{DryRun: true}},
		"encode":     {policy: decide.Never(), role: discovery.RoleDecode, in: pdflow.PickInput{Encode: 1}},
		"no decode":  {policy: decide.Never(), role: discovery.RolePrefill},
		"pairs only": {policy: decide.Never(), role: discovery.RoleDecode, serving: connector.Serving{PairOnly: true}},
	} {
		outer, err := decide.New(pick.New(newSet(t, engine("e", c.role, "")), pick.TwoChoices(), pick.WithCandidates()),
			c.policy, &c.o)
		require.NoError(t, err)
		p := outer.Bind(nil, c.serving)
		assert.Equal(t, c.ready, p.Ready(&c.in) == nil, name)
		_, err = p.Pick(t.Context(), &c.in)
		if name != "some" { // of these the short ones are served
			assert.Equal(t, c.ready, err == nil, name)
		}
	}
}

// A second prefill beside a slow one belongs to a request that was decided already.
func TestASecondPrefillIsNotDecided(t *testing.T) {
	refuse := decide.Func(func(_ *decide.Input, out *decide.Decision) {
		*out = decide.Decision{Action: decide.Refuse, Prefill: decide.Any, Decode: decide.Any}
	})
	o := &decide.Options{Class: func(*pdflow.PickInput) decide.Class { return decide.Class{Refusable: true} }}
	for name, policy := range map[string]decide.Policy{"alone": decide.Never(), "refused": refuse} {
		p := around(t, newSet(t, engines(2, "")...), policy, o)
		in := &pdflow.PickInput{Request: completion(t, text(100)), Attempt: 1, Avoid: []string{"p0"}, Pair: true}
		assert.Equal(t, "p1", mustPick(t, p, in).Prefill.ID, name)
	}
}

func TestPairsStayWithinTheirGroup(t *testing.T) {
	var eps []discovery.Endpoint
	for i := range 12 {
		group := "group=" + strconv.Itoa(i%6)
		eps = append(eps, engine("p"+strconv.Itoa(i), discovery.RolePrefill, group),
			engine("d"+strconv.Itoa(i), discovery.RoleDecode, group))
	}
	policy := &spy{Policy: decide.Predicted(decide.PredictedOptions{})}
	p := around(t, newSet(t, eps...), policy, &decide.Options{Engine: h100s})
	reasons := map[string]int{}
	for range 200 {
		x := mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(8000))})
		if reasons[x.Reason]++; x.Prefill.URL != nil {
			assert.Equal(t, x.Prefill.Group, x.Decode.Group)
		}
	}
	assert.Zero(t, reasons["changed"], "what is decided can be picked")
}

func TestTurnTwoGoesWhereTheKVIs(t *testing.T) {
	policy := &spy{Policy: decide.Threshold(200, 0)}
	inner := pick.New(newSet(t, engines(4, "")...), pick.PrefixAffinity(), pick.WithCandidates())
	outer, err := decide.New(inner, policy, nil)
	require.NoError(t, err)
	p := outer.Bind(nil, anyAlone)
	first := mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(8000))})
	require.NotNil(t, first.Prefill.URL)
	second := mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(8100))})
	assert.Nil(t, second.Prefill.URL)
	assert.Equal(t, first.Decode.ID, second.Decode.ID, "it has fetched the KV of turn 1")
	assert.Equal(t, decide.ReasonCached, second.Reason)
	for _, c := range policy.last().Decode {
		assert.False(t, c.CachedExact)
	}
	other := mustPick(t, p, &pdflow.PickInput{Request: completion(t, strings.Replace(text(8100), "word", "else", 1))})
	assert.NotNil(t, other.Prefill.URL)
}

// index is a cache that knows one engine.
type index struct{ decide.Cached }

func (x index) Match(_ *pdflow.PickInput, found []decide.Cached) int {
	return copy(found, []decide.Cached{x.Cached})
}

func TestAnIndexOfKVIsAsked(t *testing.T) {
	policy := &spy{Policy: decide.Threshold(1024, 0)}
	p := around(t, newSet(t, engines(100, "")...), policy, &decide.Options{Cache: index{decide.Cached{Engine: "d73",
		Tokens: 1990, Exact: true}}})
	for range 20 {
		x := mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(8000))})
		assert.Equal(t, "d73", x.Decode.ID, "of a hundred engines the one that has the prompt is a candidate")
		assert.Nil(t, x.Prefill.URL)
	}
	assert.True(t, policy.last().Decode[0].CachedExact)
}

// held is what engines' events tell of each prompt, which has seven tokens.
type held []kvindex.Hit

func (h held) Match(_ *kvindex.Query, dst []kvindex.Hit) []kvindex.Hit { return append(dst, h...) }

func (held) Tokens(context.Context, *connector.ClientRequest) (ids []uint32, exact bool, err error) {
	return make([]uint32, 7), true, nil
}

func TestWhatEventsTellIsKnownToThePolicy(t *testing.T) {
	policy := &spy{Policy: decide.Always()}
	h := held{{Engine: "p1", Tokens: 6, Exact: true}, {Engine: "d1", Tokens: 5}}
	inner := pick.New(newSet(t, engines(2, "")...), pick.KV(pick.KVOptions{Index: h, Tokens: h}), pick.WithCandidates())
	outer, err := decide.New(inner, policy, nil)
	require.NoError(t, err)
	mustPick(t, outer.Bind(nil, anyAlone), &pdflow.PickInput{Request: completion(t, text(800))})
	in := policy.last()
	assert.Equal(t, 7, in.Prompt)
	told := map[int]bool{}
	for _, c := range slices.Concat(in.Prefill, in.Decode) {
		if c.Cached > 0 {
			told[c.Cached] = c.CachedExact
		}
	}
	assert.Equal(t, map[int]bool{6: true, 5: false}, told)
}

func TestADryRunChangesNoChoice(t *testing.T) {
	set := newSet(t, engines(20, "")...)
	for _, name := range pick.Policies() {
		inner, err := pick.ParsePolicy(name)
		require.NoError(t, err)
		plain := pick.New(set, inner, pick.WithSeed(7), pick.WithCandidates())
		outer, err := decide.New(pick.New(set, inner, pick.WithSeed(7), pick.WithCandidates()), decide.Never(),
			&decide.Options{DryRun: true})
		require.NoError(t, err)
		dry := outer.Bind(nil, anyAlone)
		for i := range 200 {
			in := &pdflow.PickInput{Request: completion(t, text(100*(i%9)+300))}
			want, got := mustPick(t, plain, in), mustPick(t, dry, in)
			require.Equal(t, [2]string{want.Prefill.ID, want.Decode.ID}, [2]string{got.Prefill.ID, got.Decode.ID})
			require.Empty(t, got.Reason)
			if i%3 > 0 {
				want.Done(&pdflow.Outcome{})
				got.Done(&pdflow.Outcome{})
			}
		}
	}
}

func TestARefusalSaysWhenToComeAgain(t *testing.T) {
	waiting := 30
	o := &decide.Options{Engine: h100s, Class: func(*pdflow.PickInput) decide.Class {
		return decide.Class{TTFT: 200 * time.Millisecond, Refusable: true}
	}, Load: func(string) inspect.Load { return inspect.Load{At: time.Now(), Running: 64, Waiting: waiting} }}
	p := around(t, newSet(t, engines(1, "")...), decide.Predicted(decide.PredictedOptions{}), o)
	in := &pdflow.PickInput{Request: completion(t, text(2000)), Attempt: 1}
	_, err := p.Pick(t.Context(), in)
	var e *pdflow.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, pdflow.CodeOverloaded, e.Code)
	assert.InDelta(t, 3, e.RetryAfter.Seconds(), 2)
	waiting = 100_000
	_, err = p.Pick(t.Context(), in)
	require.ErrorAs(t, err, &e)
	assert.Equal(t, time.Minute, e.RetryAfter, "by then, all may be different")
	in.Attempt = 2
	mustPick(t, p, in) // it was admitted
}

func TestAPickerThatTellsNoCandidatesIsAskedForAPair(t *testing.T) {
	set := newSet(t, engines(2, "")...)
	for name, inner := range map[string]pdflow.Picker{
		"without WithCandidates": pick.New(set, pick.RoundRobin()),
		"a host's": pick.Func(func(_ context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
			out := pdflow.Pick{Prefill: engine("p0", discovery.RolePrefill, ""),
				Decode: engine("d0", discovery.RoleDecode, "")}
			if in.Single {
				out.Prefill = discovery.Endpoint{}
			}
			return out, nil
		}),
	} {
		outer, err := decide.New(inner, decide.Threshold(1000, 0), nil)
		require.NoError(t, err, name)
		p := outer.Bind(nil, anyAlone)
		x := mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(100))})
		assert.Nil(t, x.Prefill.URL, name)
		assert.Equal(t, decide.ReasonShort, x.Reason, name)
		x = mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(8000))})
		assert.NotNil(t, x.Prefill.URL, name)
		p = outer.Bind(nil, connector.Serving{PairOnly: true})
		x = mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(100))})
		assert.NotNil(t, x.Prefill.URL, name)
	}
}

func TestLoadsOfEnginesCountBesideWhatWasSent(t *testing.T) {
	policy := &spy{Policy: decide.Predicted(decide.PredictedOptions{})}
	at := time.Now()
	facts := decide.Facts{Speed: h100, KVTokens: 1000}
	o := &decide.Options{Engine: func(*discovery.Endpoint) decide.Facts { return facts },
		Load: func(id string) inspect.Load {
			return map[string]inspect.Load{"p0": {At: at, Waiting: 3},
				"d0": {At: at, Running: 5, Waiting: 2, KVUsage: 0.75}, "d1": {At: at.Add(-time.Minute), Running: 9}}[id]
		}}
	p := around(t, newSet(t, engines(2, "")...), policy, o)
	given := mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(396))})
	given.PrefillDone(&pdflow.LegOutcome{Err: &pdflow.Error{Code: pdflow.CodeCanceled}})
	given.Done(&pdflow.Outcome{Err: &pdflow.Error{Code: pdflow.CodeCanceled}})
	mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(396))})
	for _, c := range policy.last().Prefill {
		assert.Equal(t, 300, c.QueueTokens, "three requests of others are taken to be like this one")
	}
	told := 0
	for _, c := range policy.last().Decode {
		assert.Equal(t, [2]int{7, 700}, [2]int{c.Running, c.Context}, "who says nothing has as many as the others")
		if c.KV != (decide.Memory{}) {
			assert.Equal(t, decide.Memory{Free: 250, Total: 1000}, c.KV)
			assert.Equal(t, 2, c.Queue)
			assert.Positive(t, c.Age)
			told++
		}
	}
	assert.Equal(t, 1, told, "a load of a minute ago says nothing")
}

func TestWhatIsInFlightCountsUntilItHasEnded(t *testing.T) {
	policy := &spy{Policy: decide.Always()}
	p := around(t, newSet(t, engines(1, "")...), policy, nil)
	in := &pdflow.PickInput{Request: completion(t, text(396))}
	first, second := mustPick(t, p, in), mustPick(t, p, in)
	mustPick(t, p, in)
	assert.Equal(t, 200, policy.last().Prefill[0].QueueTokens)
	assert.Equal(t, [2]int{2, 200}, [2]int{policy.last().Decode[0].Coming, policy.last().Decode[0].ComingContext})
	first.PrefillDone(&pdflow.LegOutcome{})
	mustPick(t, p, in).Done(&pdflow.Outcome{})
	assert.Equal(t, [2]int{1, 100}, [2]int{policy.last().Decode[0].Running, policy.last().Decode[0].Context})
	assert.Equal(t, 200, policy.last().Prefill[0].QueueTokens, "two of three")
	first.Done(&pdflow.Outcome{})
	second.Done(&pdflow.Outcome{PrefillRuns: true})
	mustPick(t, p, in)
	assert.Equal(t, 200, policy.last().Prefill[0].QueueTokens, "a leg that runs on counts")
	assert.Equal(t, [2]int{0, 2}, [2]int{policy.last().Decode[0].Running, policy.last().Decode[0].Coming})
	second.PrefillDone(&pdflow.LegOutcome{})
	mustPick(t, p, in)
	assert.Equal(t, 200, policy.last().Prefill[0].QueueTokens, "the third one and the one before this")
}

func TestLimitsCanBePutAroundDecisions(t *testing.T) {
	inner, err := decide.New(pick.New(newSet(t, engines(2, "")...), pick.TwoChoices(), pick.WithCandidates()),
		decide.Threshold(1000, 0), nil)
	require.NoError(t, err)
	outer, err := admit.New(inner, &admit.Options{DecodeLimit: 1, Queue: -1})
	require.NoError(t, err)
	p := outer.Bind(nil, anyAlone)
	in := &pdflow.PickInput{Request: completion(t, text(100)), Attempt: 1}
	a, b := mustPick(t, p, in), mustPick(t, p, in)
	assert.NotEqual(t, a.Decode.ID, b.Decode.ID)
	_, err = p.Pick(t.Context(), in)
	require.ErrorIs(t, err, pdflow.CodeOverloaded)
	a.Done(&pdflow.Outcome{})
	x := mustPick(t, p, in)
	assert.Equal(t, a.Decode.ID, x.Decode.ID)
	assert.Nil(t, x.Prefill.URL)
}

func TestAPickWithADecisionAllocatesNothing(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector allocates")
	}
	set := newSet(t, engines(500, "")...)
	for _, inner := range []pick.Policy{pick.TwoChoices(), pick.PrefixAffinity(), pick.LeastLoad()} {
		for name, policy := range map[string]decide.Policy{"threshold": decide.Threshold(100, 0),
			"predicted": decide.Predicted(decide.PredictedOptions{})} {
			for _, dry := range []bool{false, true} {
				outer, err := decide.New(pick.New(set, inner, pick.WithCandidates()), policy,
					&decide.Options{Engine: h100s, DryRun: dry})
				require.NoError(t, err)
				p, in := outer.Bind(nil, anyAlone), &pdflow.PickInput{Request: completion(t, text(2000))}
				out := &pdflow.Outcome{}
				once := func() { mustPick(t, p, in).Done(out) }
				for range 2000 { // each engine has been met
					once()
				}
				assert.Less(t, testing.AllocsPerRun(500, once), 0.5, "%s %s %t", inner, name, dry)
			}
		}
	}
}

// BenchmarkPick is Pick and Done among a thousand engines.
func BenchmarkPick(b *testing.B) {
	set := newSet(b, engines(500, "")...)
	for name, policy := range map[string]decide.Policy{"without": nil, "threshold": decide.Threshold(1024, 0),
		"predicted": decide.Predicted(decide.PredictedOptions{})} {
		b.Run(name, func(b *testing.B) {
			p := pick.New(set, pick.TwoChoices(), pick.WithCandidates())
			if policy != nil {
				outer, err := decide.New(p, policy, &decide.Options{Engine: h100s})
				require.NoError(b, err)
				p = outer
			}
			p = p.Bind(nil, anyAlone)
			in, out := &pdflow.PickInput{Request: completion(b, text(2000))}, &pdflow.Outcome{}
			for range 2000 {
				mustPick(b, p, in).Done(out)
			}
			b.ReportAllocs()
			for b.Loop() {
				x, err := p.Pick(context.Background(), in)
				if err != nil {
					b.Fatal(err)
				}
				x.Done(out)
			}
		})
	}
}
