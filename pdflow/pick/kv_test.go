// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/admit"
	"github.com/pdkit/pdkit/pdflow/attest"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/kvindex"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// fakeTokens gives the bytes of a body's prompt as its tokens.
type fakeTokens struct {
	err     error
	inexact bool
	asked   int
}

func (f *fakeTokens) Tokens(ctx context.Context, r *connector.ClientRequest) (ids []uint32, exact bool, err error) {
	f.asked++
	if ctx == nil {
		return nil, false, errors.New("no context")
	}
	prompt, _ := r.Field("prompt")
	for _, b := range prompt {
		ids = append(ids, uint32(b))
	}
	return ids, !f.inexact, f.err
}

// fakeIndex holds the same for each prompt.
type fakeIndex struct {
	hits []kvindex.Hit
	last kvindex.Query
}

func (f *fakeIndex) Match(q *kvindex.Query, dst []kvindex.Hit) []kvindex.Hit {
	f.last = *q
	return append(dst, f.hits...)
}

func completion(t *testing.T, body string) *pdflow.PickInput {
	t.Helper()
	r, err := connector.ParseRequest(connector.APICompletions, []byte(body))
	require.NoError(t, err)
	return &pdflow.PickInput{Request: r}
}

func TestKVPicksTheEnginesThatHoldMost(t *testing.T) {
	index, tokens := &fakeIndex{}, &fakeTokens{}
	p := pick.New(newFleet(t, many(4, 4)...).Set, pick.KV(pick.KVOptions{Index: index, Tokens: tokens}))
	in := completion(t, `{"model":"m","prompt":"hello","cache_salt":"salty"}`)
	index.hits = []kvindex.Hit{{Engine: "d1", Tokens: 16}, {Engine: "d2", Tokens: 32}, {Engine: "gone", Tokens: 500},
		{Engine: "p0", Tokens: 160}, {Engine: "p2", Tokens: 320}, {Engine: "p3", Tokens: 16}}
	for range 10 {
		x := mustPick(t, p, in)
		require.Equal(t, "p2+d2", x.Prefill.ID+"+"+x.Decode.ID)
		x.Done(&pdflow.Outcome{})
	}
	require.Equal(t, "m", index.last.Model)
	require.Equal(t, "salty", index.last.Salt)
	require.Empty(t, index.last.LoRA)
	require.Len(t, index.last.Tokens, len(`"hello"`))

	in.Avoid = []string{"p2", "d2"}
	require.Equal(t, "p0+d1", pair(t, p, in), "the next best")
	in.Avoid, in.Single = nil, true
	require.Equal(t, "+d2", pair(t, p, in))
}

func TestKVSpreadsWhatSeveralHold(t *testing.T) {
	index := &fakeIndex{hits: []kvindex.Hit{{Engine: "p0", Tokens: 64}, {Engine: "p1", Tokens: 64}, {Engine: "p2",
		Tokens: 48}}}
	p := pick.New(newFleet(t, many(4, 1)...).Set, pick.KV(pick.KVOptions{Index: index, Tokens: &fakeTokens{}}))
	seen := map[string]int{}
	for range 10 {
		seen[mustPick(t, p, completion(t, `{"prompt":"hello"}`)).Prefill.ID]++
	}
	require.Equal(t, map[string]int{"p0": 5, "p1": 5}, seen)
}

func TestKVDoesNotOverloadTheEngineThatHolds(t *testing.T) {
	index := &fakeIndex{hits: []kvindex.Hit{{Engine: "p0", Tokens: 64}}}
	p := pick.New(newFleet(t, many(4, 1)...).Set, pick.KV(pick.KVOptions{Index: index, Tokens: &fakeTokens{}}),
		pick.WithBound(1.25, 0))
	seen := map[string]int{}
	for range 40 {
		seen[mustPick(t, p, completion(t, `{"prompt":"`+strings.Repeat("a", 4000)+`"}`)).Prefill.ID]++
	}
	require.Len(t, seen, 4)
	require.LessOrEqual(t, seen["p0"], 15)
}

func TestKVKnowsAdaptersByTheBaseModel(t *testing.T) {
	index := &fakeIndex{}
	p := pick.New(newFleet(t, many(2, 1)...).Set, pick.KV(pick.KVOptions{Index: index, Tokens: &fakeTokens{},
		Model:   "base",
		Adapter: func(m string) bool { return m == "ada" }}))
	mustPick(t, p, completion(t, `{"model":"ada","prompt":"x"}`))
	require.Equal(t, [2]string{"base", "ada"}, [2]string{index.last.Model, index.last.LoRA})
	mustPick(t, p, completion(t, `{"model":"other-name","prompt":"x"}`))
	require.Equal(t, [2]string{"base", ""}, [2]string{index.last.Model, index.last.LoRA})
}

// What the index does not know is chosen by what was sent lately.
func TestKVWithoutHitsIsPrefix(t *testing.T) {
	for name, c := range map[string]struct {
		tokens *fakeTokens
		asks   bool
	}{
		"nobody holds it":   {&fakeTokens{}, true},
		"tokens not known":  {&fakeTokens{err: errors.New("no")}, false},
		"tokens not exact":  {&fakeTokens{inexact: true}, false},
		"nothing to ask of": {nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			index := &fakeIndex{}
			o := pick.KVOptions{Index: index, Tokens: c.tokens}
			if c.tokens == nil {
				o.Tokens = &fakeTokens{}
			}
			p := pick.New(newFleet(t, many(8, 1)...).Set, pick.KV(o))
			if c.tokens == nil {
				mustPick(t, p, &pdflow.PickInput{})
				return
			}
			in := completion(t, `{"model":"m","prompt":"`+strings.Repeat("long ", 400)+`"}`)
			first := mustPick(t, p, in)
			first.Done(&pdflow.Outcome{})
			for range 5 {
				x := mustPick(t, p, in)
				require.Equal(t, first.Prefill.ID, x.Prefill.ID)
				x.Done(&pdflow.Outcome{})
			}
			require.Equal(t, c.asks, index.last.Model == "m")
		})
	}
}

// A prompt that the index has led to an engine is remembered for the time until its blocks are announced.
func TestKVRemembersWhatItSent(t *testing.T) {
	index := &fakeIndex{hits: []kvindex.Hit{{Engine: "p5", Tokens: 16}}}
	p := pick.New(newFleet(t, many(8, 1)...).Set, pick.KV(pick.KVOptions{Index: index, Tokens: &fakeTokens{}}))
	in := completion(t, `{"model":"m","prompt":"`+strings.Repeat("long ", 400)+`"}`)
	mustPick(t, p, in).Done(&pdflow.Outcome{})
	index.hits = nil
	require.Equal(t, "p5", mustPick(t, p, in).Prefill.ID)
}

func TestKVChoosesTheRankThatHolds(t *testing.T) {
	f := newFleet(t, ep("p", prefill, "dpSize=4"), ep("q", prefill), ep("d", decode))
	index := &fakeIndex{hits: []kvindex.Hit{{Engine: "p", Rank: 1, Tokens: 16}, {Engine: "p", Rank: 3, Tokens: 64}}}
	p := pick.New(f.Set, pick.KV(pick.KVOptions{Index: index, Tokens: &fakeTokens{}}))
	for range 5 {
		x := mustPick(t, p, completion(t, `{"prompt":"x"}`))
		rank, ok := x.PrefillRank.Get()
		require.True(t, ok)
		require.Equal(t, 3, rank)
		x.Done(&pdflow.Outcome{})
	}
}

// Events tell ranks of the whole engine, of which a URL may have the later ones.
func TestKVChoosesTheRankBehindTheURL(t *testing.T) {
	f := newFleet(t, ep("p", prefill, "dpSize=8", "dpSizeLocal=2", "dpStartRank=4"), ep("q", prefill), ep("d", decode))
	index := &fakeIndex{hits: []kvindex.Hit{{Engine: "p", Rank: 0, Tokens: 64}, {Engine: "p", Rank: 5, Tokens: 16}}}
	p := pick.New(f.Set, pick.KV(pick.KVOptions{Index: index, Tokens: &fakeTokens{}}))
	for range 5 {
		x := mustPick(t, p, completion(t, `{"prompt":"x"}`))
		require.Equal(t, "p", x.Prefill.ID)
		rank, ok := x.PrefillRank.Get()
		require.True(t, ok)
		require.Equal(t, 1, rank)
		x.Done(&pdflow.Outcome{})
	}
}

// waiting tells no tokens until it is let go, and fails then.
type waiting struct {
	asked atomic.Int64
	let   chan struct{}
}

func (w *waiting) Tokens(ctx context.Context, r *connector.ClientRequest) ([]uint32, bool, error) {
	w.asked.Add(1)
	if r.Model == "slow" {
		select {
		case <-w.let:
		case <-ctx.Done():
		}
	}
	return nil, false, errors.New("no tokens")
}

// limited is the pickers of a program around one that chooses by the engines' events.
func limited(t *testing.T, tokens pick.PromptTokens, o *admit.Options, eps ...discovery.Endpoint) *admit.Picker {
	t.Helper()
	inner := pick.New(newFleet(t, eps...).Set, pick.KV(pick.KVOptions{Index: &fakeIndex{}, Tokens: tokens}),
		pick.WithCandidates())
	decider, err := decide.New(attest.NewQuarantine(inner), decide.Never(), nil)
	require.NoError(t, err)
	p, err := admit.New(decider, o)
	require.NoError(t, err)
	bound, ok := p.Bind(nil, connector.Serving{}).(*admit.Picker)
	require.True(t, ok)
	return bound
}

func TestNobodyWaitsForTheTokensOfAnother(t *testing.T) {
	tokens := &waiting{let: make(chan struct{})}
	p := limited(t, tokens, &admit.Options{PrefillLimit: 10}, many(2, 2)...)
	var slow sync.WaitGroup
	slow.Go(func() {
		_, err := p.Pick(t.Context(), completion(t, `{"model":"slow","prompt":"x"}`))
		assert.NoError(t, err)
	})
	require.Eventually(t, func() bool { return tokens.asked.Load() == 1 }, 10*time.Second, time.Millisecond)
	done := make(chan struct{})
	go func() {
		defer close(done)
		mustPick(t, p, completion(t, `{"model":"m","prompt":"x"}`)).Done(&pdflow.Outcome{})
		p.State()
	}()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Error("a pick waits")
	}
	close(tokens.let)
	slow.Wait()
	<-done
}

func TestTokensAreAskedForOnceWhileARequestWaits(t *testing.T) {
	tokens := &waiting{}
	p := limited(t, tokens, &admit.Options{DecodeLimit: 1, Load: func(string) inspect.Load {
		return inspect.Load{}
	}}, many(1, 2)...)
	in := completion(t, `{"model":"m","prompt":"x"}`)
	first := mustPick(t, p, in)
	mustPick(t, p, in)
	var waits sync.WaitGroup
	waits.Go(func() {
		_, err := p.Pick(t.Context(), in)
		assert.NoError(t, err)
	})
	require.Eventually(t, func() bool { return p.Queued() == 1 }, 10*time.Second, time.Millisecond)
	time.Sleep(200 * time.Millisecond) // some tries of the queue's head
	first.Done(&pdflow.Outcome{})
	waits.Wait()
	require.EqualValues(t, 3, tokens.asked.Load(), "once a request")
}

func TestWithoutAChoiceNobodyIsAskedForTokens(t *testing.T) {
	tokens := &fakeTokens{}
	f := newFleet(t, ep("p0", prefill, "group=a"), ep("d0", decode, "group=a"))
	p := pick.New(f.Set, pick.KV(pick.KVOptions{Index: &fakeIndex{}, Tokens: tokens}))
	in := completion(t, `{"model":"m","prompt":"x"}`)
	require.Equal(t, "p0+d0", pair(t, p, in))
	f.replace(many(2, 2)...)
	in.Prefill, in.Decode = "p0", "d1"
	require.Equal(t, "p0+d1", pair(t, p, in))
	preparer, ok := p.(pdflow.Preparer)
	require.True(t, ok)
	prepared := preparer.Prepare(t.Context(), in)
	require.Zero(t, tokens.asked)
	prepared.Prefill = ""
	pair(t, p, prepared)
	require.Zero(t, tokens.asked, "it is prepared")
	in.Prefill = ""
	pair(t, p, in)
	require.Equal(t, 1, tokens.asked)
}

// What a decider is told of the prompt comes from the events, or else from what was sent lately.
func TestCandidatesTellWhatTheEventsTell(t *testing.T) {
	index := &fakeIndex{}
	p := pick.New(newFleet(t, many(30, 2)...).Set, pick.KV(pick.KVOptions{Index: index, Tokens: &fakeTokens{}}),
		pick.WithCandidates())
	in := completion(t, `{"model":"m","prompt":"`+strings.Repeat("long ", 400)+`"}`)
	sent := mustPick(t, p, in)
	sent.Done(&pdflow.Outcome{})
	teller, ok := p.(interface {
		Candidates(in *pdflow.PickInput, c *pick.Candidates) bool
		pdflow.Preparer
	})
	require.True(t, ok)
	var c pick.Candidates
	cached := func(in *pdflow.PickInput) map[string]pick.Candidate {
		require.True(t, teller.Candidates(in, &c))
		found := map[string]pick.Candidate{}
		for _, x := range slices.Concat(c.Prefill, c.Decode) {
			if x.Cached > 0 {
				found[x.Endpoint.ID] = pick.Candidate{Cached: x.Cached, Exact: x.Exact}
			}
		}
		return found
	}
	approximate := cached(in)
	require.Len(t, approximate, 2)
	require.Positive(t, approximate[sent.Prefill.ID].Cached)
	require.False(t, approximate[sent.Decode.ID].Exact)

	index.hits = []kvindex.Hit{{Engine: "p7", Tokens: 16}, {Engine: "p21", Tokens: 64, Exact: true},
		{Engine: "d1", Tokens: 32, Exact: true}}
	require.Equal(t, approximate, cached(in), "nobody has asked for its tokens")
	require.Equal(t, map[string]pick.Candidate{"p7": {Cached: 16}, "p21": {Cached: 64, Exact: true},
		"d1": {Cached: 32, Exact: true}}, cached(teller.Prepare(t.Context(), in)))
}

// The candidate of an engine with ranks stands for all of them: what one of them holds is the engine's.
func TestACandidateHasWhatOneOfItsRanksHolds(t *testing.T) {
	in := completion(t, `{"model":"m","prompt":"`+strings.Repeat("long ", 400)+`"}`)
	in.Prompt = &pdflow.Prompt{IDs: make([]uint32, 2000), Exact: true}
	index := &fakeIndex{}
	for name, policy := range map[string]pick.Policy{"prefix": pick.PrefixAffinity(),
		"kv": pick.KV(pick.KVOptions{Index: index, Tokens: &fakeTokens{}})} {
		p := pick.New(newFleet(t, many(1, 1, "dpSize=4")...).Set, policy, pick.WithCandidates())
		teller, ok := p.(interface {
			Candidates(in *pdflow.PickInput, c *pick.Candidates) bool
		})
		require.True(t, ok)
		for range 8 { // on any rank
			sent := mustPick(t, p, in)
			rank, _ := sent.DecodeRank.Get()
			index.hits = []kvindex.Hit{{Engine: "d0", Tokens: 1024, Rank: rank, Exact: true}}
			var c pick.Candidates
			require.True(t, teller.Candidates(in, &c))
			require.Positive(t, c.Decode[0].Cached, "%s: rank %d", name, rank)
		}
	}
}

func TestAKVPickAllocatesNothing(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector allocates")
	}
	index := kvindex.New()
	in := completion(t, `{"model":"m","prompt":"hello"}`)
	ids := make([]uint32, 64)
	p := pick.New(newFleet(t, many(8, 8)...).Set, pick.KV(pick.KVOptions{Index: index, Tokens: given(ids)}))
	outcome := &pdflow.Outcome{}
	require.Zero(t, testing.AllocsPerRun(100, func() { mustPick(t, p, in).Done(outcome) }))
}

type given []uint32

func (g given) Tokens(context.Context, *connector.ClientRequest) ([]uint32, bool, error) {
	return g, true, nil
}

func TestAPolicyThatNeedsAnIndexHasNoName(t *testing.T) {
	_, err := pick.ParsePolicy("kv")
	require.ErrorContains(t, err, "pick.KV")
	require.Equal(t, "kv", pick.KV(pick.KVOptions{}).String())
	require.NotContains(t, pick.Policies(), "kv")
}
