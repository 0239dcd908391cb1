// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/internal/inflight"
	"github.com/pdkit/pdkit/pdflow/internal/names"
)

// chooser makes a policy's choices. choose returns a target of l, which is not empty, or nil. If the target is nil or
// not good, the picker scans the list itself. Many goroutines call choose at once.
type chooser interface {
	choose(l *list, q *query) *target
}

// learner is a chooser that is told each choice. second is nil if one engine serves the whole request.
type learner interface {
	chosen(q *query, first, second *target)
}

// state is what all pickers share that were bound from one of New: engines' loads and cooldowns, and what the policy
// remembers.
type state struct {
	set          *discovery.Set
	policy       Policy
	opts         *options
	chooser      chooser
	learner      learner
	cooldowns    cooldowns
	cooldownDone func(*pdflow.Outcome)
	picks        atomic.Uint64
	heard        atomic.Uint64     // engines, one after another
	means        [2]atomic.Int64   // tokens of a request, by leg
	strangers    [2]inflight.Fleet // requests of others at an engine, by leg
	queries      sync.Pool
	tickets      sync.Pool
	names        names.Index

	mu    sync.Mutex // held while a table is made
	snap  *discovery.Snapshot
	known registry
}

// New returns a picker that chooses pairs from the set's latest snapshot by the policy. The zero Policy is
// [RoundRobin].
//
// Each flow gets a picker of its own, by Bind, for the rules of its connector. It finds once per snapshot which engines
// can form a pair. A prefill and a decode engine can if all of these hold:
//   - They have the same group; "" is a group too.
//   - They have the same model and the same engine version. An engine whose model or version is unknown fits any.
//   - Both run the flow's connector. The attribute connector lists an engine's connectors, by name or by the engine's
//     class name, separated by commas; an engine without the attribute runs any. The connector http transfers nothing
//     and fits any engine. If the picker is not bound to a connector, the two lists must have one in common.
//   - Their lists kvNetwork have an element in common, if both have the attribute.
//   - The connector's own rules ([connector.Traits]) and those of [WithRules] allow it.
//
// Flows of several connectors (a rollout, a fallback) can be given the same picker. They then share its loads, its
// cooldowns and what the policy remembers of engines. An engine that serves a whole request does so for any connector.
//
// With every policy the picker avoids engines that failed this request. An engine that cannot be reached gets a
// cooldown of one second, which doubles with each further fault up to 8 s. So does an engine at which two different
// bodies failed while it served no request, since one body alone may draw a fault from every engine, and a pair that
// left an orphan or whose decode engine failed after prefill. After a cooldown, and when it is ready again, an engine
// gets a tenth of its picks, then more and more; one that answers 429 or 503 gets fewer for 8 s. A pair or an engine at
// which requests ran out of time gets a longer cooldown, 8 s to 4 minutes, after which something has to be served there
// first: see [Prober]. Such cooldowns take at most half of the pairs. An engine that has
// answered that it does not have a model (pdflow.Error.ModelMissing) is not picked for that model for 10 s. Where the
// attribute maxModelLen differs between engines, one is not picked whose context is shorter than a prompt of token ids,
// than the request's limit of tokens, or than what has just been too short for it. If only such engines are left, the
// picker uses them. An engine whose attribute dpSize is 2 to 1,024 counts as that many
// targets, and the pick names the rank on each leg. If no pair is found, the error says what the nearest prefill and
// decode engines lack to form one, without their names.
//
// The time of a pick is constant or grows with the logarithm of the number of engines, and a pick allocates nothing,
// unless nearly all engines are in a cooldown. The picker prepares a snapshot of more than 256 endpoints in a goroutine
// of its own; for those milliseconds picks use the snapshot before it.
//
// The caller must call Pick.Done. Policies that look at load count a request on the decode engine until then, and on
// the prefill engine until Pick.PrefillDone.
func New(set *discovery.Set, policy Policy, opts ...Option) pdflow.Picker {
	if policy.make == nil {
		policy = RoundRobin()
	}
	s := &state{set: set, policy: policy, opts: newOptions(opts)}
	s.chooser = policy.make(s.opts)
	if s.opts.candidates {
		_, index := s.chooser.(matcher)
		n := &s.policy.needs
		n.loads, n.tree, n.index, n.indexPeers = true, true, n.index || index, n.indexPeers || index
	}
	s.learner, _ = s.chooser.(learner)
	s.cooldowns.seed, s.cooldownDone = s.opts.seed, s.cooldowns.done
	s.known.seed, s.known.told = s.opts.seed, s.opts.load != nil
	return s.bind(newPairing(nil, connector.Serving{}, s.opts))
}

// Changed is closed at the set's next snapshot.
func (p *picker) Changed() <-chan struct{} { return p.set.Changed() }

// NamesEngine reports whether a word names an engine of the set.
func (p *picker) NamesEngine(word string) bool { return p.names.Has(p.set.Load(), word) }

// EngineHealth tells what the set's health probes have shown. An engine is not well, either, where requests ran out of
// time and nothing was served since: its server may answer although its scheduler stands still.
func (p *picker) EngineHealth(id string) (well, known bool) {
	if p.cooldowns.hangsNow(id) {
		return false, true
	}
	return healthIn(p.set, id)
}

// probeFresh is how long the verdict of a health probe is fresh: package pdflow/health probes each 2 s by default, and
// engines that serve every fourth time.
const probeFresh = 10 * time.Second

// healthIn is what a set knows of an engine. One that its source calls not ready may be draining, or be loading a
// model beside the streams that it has.
func healthIn(set *discovery.Set, id string) (well, known bool) {
	well, at := set.Healthy(id)
	return well, !at.IsZero() && time.Since(at) < probeFresh
}

// asker is a chooser that asks for the tokens of a prompt.
type asker interface {
	ask(ctx context.Context, r *connector.ClientRequest) pdflow.Prompt
}

// Prepare asks for the tokens that [KV] needs, where there is a choice.
func (p *picker) Prepare(ctx context.Context, in *pdflow.PickInput) *pdflow.PickInput {
	a, ok := p.chooser.(asker)
	if !ok || in.Prompt != nil {
		return in
	}
	out := *in
	out.Prompt = &pdflow.Prompt{}
	if in.Request != nil && p.choice(in) {
		*out.Prompt = a.ask(ctx, in.Request)
	}
	return &out
}

// choice reports whether there are several engines, or ranks, to choose from.
func (p *picker) choice(in *pdflow.PickInput) bool {
	t := p.load()
	from := t.loaded(in, p.pairing.serving)
	if from == nil {
		from = t.part(in)
	}
	l, single := from.candidates(in, p.pairing.serving)
	l, second := p.named(l, in, single)
	return l != nil && several(l, second, single)
}

// Pick does not block, unless the policy is [KV] and Prepare was not called: then it asks for the prompt's tokens.
func (p *picker) Pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	t := p.load()
	if t.tellers != nil {
		p.hearNext(t.tellers)
	}
	choice, found := p.pick(ctx, t, in)
	if found != pair && t.snap != p.set.Load() { // the newer snapshot may have a pair
		t = p.rebuild()
		choice, found = p.pick(ctx, t, in)
	}
	switch found {
	case nobody:
		return pdflow.Pick{}, t.notReady(in, p.pairing)
	case withoutModel:
		return pdflow.Pick{}, &pdflow.Error{Code: pdflow.CodeNotFound, Phase: "pick", Param: "model",
			Message: "no engine that is ready has the model"}
	}
	return choice, nil
}

// finding is what a pick has found.
type finding int

const (
	pair finding = iota
	nobody
	// The best pair does not have the model, as one of its engines has said. A request's first attempt takes it all the
	// same, since engines load adapters at any time. When another engine has just said the same, it does not.
	withoutModel
)

// pick picks engines that have loaded the adapter that the request names, or else from all that can serve it: they may
// load it.
func (p *picker) pick(ctx context.Context, t *table, in *pdflow.PickInput) (out pdflow.Pick, found finding) {
	if from := t.loaded(in, p.pairing.serving); from != nil {
		if out, found = p.pickFrom(ctx, from, in, true); found == pair {
			return out, found
		}
	}
	return p.pickFrom(ctx, t.part(in), in, in.Attempt > 1)
}

// pickFrom picks some of a part's engines. strict says that they must have the model, for all that is known. Where some
// have hung, one pick tries them: of several that have chosen them, the first does, and the others choose again.
func (p *picker) pickFrom(ctx context.Context, from *part, in *pdflow.PickInput, strict bool) (out pdflow.Pick,
	found finding) {
	for range triesMost {
		out = pdflow.Pick{}
		found = p.pickOnce(ctx, from, in, strict, &out)
		if found != pair {
			return out, found
		}
		release, ok := p.cooldowns.try(out.Prefill.ID, out.Decode.ID)
		if release != nil {
			done := out.Done
			out.Done = func(o *pdflow.Outcome) { done(o); release() }
		}
		if ok {
			return out, found
		}
		out.Done(&pdflow.Outcome{Err: &pdflow.Error{Code: pdflow.CodeCanceled}})
	}
	out = pdflow.Pick{}
	found = p.pickOnce(ctx, from, in, strict, &out)
	return out, found
}

// triesMost is how often a pick loses against others before it takes what it is given.
const triesMost = 3

// pickOnce fills out, since a Pick is large, and each stream keeps the stack that its request needed at most.
func (p *picker) pickOnce(ctx context.Context, from *part, in *pdflow.PickInput, strict bool,
	out *pdflow.Pick) finding {
	l, single := from.candidates(in, p.pairing.serving)
	l, other := p.named(l, in, single)
	if l == nil || len(l.targets) == 0 {
		return nobody
	}
	q := p.query(ctx, in, single, from.room(in))
	defer p.release(q)
	q.second, q.tellers = other, from.tellers
	first := p.choose(l, q)
	if first == nil {
		return nobody
	}
	var second *target
	if !single {
		peers := first.peers
		if other != "" {
			peers = peers.of(other)
		}
		q.peer = first
		second = p.choose(peers, q)
		q.peer = nil
	}
	if strict && (q.missing[first.endpoint.ID] || second != nil && q.missing[second.endpoint.ID]) {
		return withoutModel
	}
	prefill, decode := second, first
	if first.leg == prefillLeg {
		if prefill, decode = first, second; second == nil { // a single engine of role both serves the whole request
			prefill, decode = nil, first
		}
	}
	out.Decode, out.DecodeRank = *decode.endpoint, discovery.RankOf(int(decode.rank))
	if prefill != nil {
		out.Prefill, out.PrefillRank = *prefill.endpoint, discovery.RankOf(int(prefill.rank))
	}
	if in.Encode > 0 && !single {
		out.Encode = encoders(from.encodes, q)
	}
	if p.learner != nil {
		p.learner.chosen(q, first, second)
	}
	if out.Done = p.cooldownDone; p.policy.needs.loads {
		t := p.ticket(q, prefill, decode, p.pairing.late)
		out.Done, out.PrefillDone = t.done, t.ended
	}
	return pair
}

// candidates returns the engines of which one is chosen first. single is true if it serves the whole request.
func (p *part) candidates(in *pdflow.PickInput, serving connector.Serving) (l *list, single bool) {
	switch {
	case !in.Single && (!serving.PairOnly || len(p.pairs.targets) > 0 && !p.servesBoth(in.Decode)):
		return p.pairs, false
	case serving.PairOnly:
		return p.boths, true
	case serving.PrefillPairOnly:
		return p.decodes, true
	}
	return p.singles, true
}

// servesBoth reports whether an engine is named that has the role both.
func (p *part) servesBoth(id string) bool { return id != "" && p.boths.of(id) != nil }

// Ready tells, without choosing, whether Pick would find engines for a request.
func (p *picker) Ready(in *pdflow.PickInput) error {
	t := p.rebuild()
	from := t.part(in)
	if loaded := t.loaded(in, p.pairing.serving); loaded != nil {
		from = loaded
	}
	l, single := from.candidates(in, p.pairing.serving)
	l, _ = p.named(l, in, single)
	switch {
	case t.snap.Version == 0:
		return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: "the engines are not known yet"}
	case l == nil || len(l.targets) == 0:
		return t.notReady(in, p.pairing)
	case in.Encode > 0 && !single && len(from.encodes) == 0:
		return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: "no encode engine is ready"}
	}
	return nil
}

// choose returns the policy's choice if that is good, else the best target of the list. Where the engine that is chosen
// has news of its load, the policy chooses once more.
func (s *state) choose(l *list, q *query) *target {
	t := s.chooser.choose(l, q)
	if t != nil && q.tellers != nil && s.hear(q.tellers.byID[t.endpoint.ID]) {
		t = s.chooser.choose(l, q)
	}
	if t != nil && q.rank(t) == good {
		return t
	}
	return q.scan(l)
}

func (s *state) query(ctx context.Context, in *pdflow.PickInput, single bool, room [2]int64) *query {
	q, _ := s.queries.Get().(*query)
	if q == nil {
		q = &query{opts: s.opts, cooldowns: &s.cooldowns}
	}
	q.ctx, q.in, q.single, q.room = ctx, in, single, room
	if in.Request != nil {
		q.missing = s.cooldowns.missing.engines(in.Request.Model)
	}
	q.clean = len(in.Avoid) == 0 && q.missing == nil && room == [2]int64{} && s.cooldowns.n.Load() == 0
	q.number = s.picks.Add(1) - 1
	q.random = s.opts.seed + scramble(q.number)
	q.roll = q.random
	if s.policy.needs.loads {
		q.cost = costOf(in.Request)
		if single {
			q.cost[decodeLeg] += q.cost[prefillLeg]
		}
	}
	return q
}

func (s *state) release(q *query) {
	q.ctx, q.in, q.peer, q.best, q.memo, q.missing, q.tellers = nil, nil, nil, best{}, nil, nil, nil
	s.queries.Put(q)
}

// encoders returns up to the wanted number of encode engines, round robin. It prefers good ones and takes others if
// there are none.
func encoders(all []*discovery.Endpoint, q *query) []discovery.Endpoint {
	want := min(q.in.Encode, len(all))
	chosen := make([]discovery.Endpoint, 0, want)
	for rank := good; rank <= lacking && len(chosen) == 0; rank++ {
		for i := 0; i < len(all) && len(chosen) < want; i++ {
			e := all[(q.number+uint64(i))%uint64(len(all))]
			if q.rankAlone(&target{endpoint: e}) == rank {
				chosen = append(chosen, *e)
			}
		}
	}
	return chosen
}
