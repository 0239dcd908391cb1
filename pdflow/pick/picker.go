// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// chooser is a policy at work. choose returns a target of l, which is not empty, or nil; where what it returns is not good, or nil, the
// picker looks through the list by itself. It is called by many goroutines at once.
type chooser interface {
	choose(l *list, q *query) *target
}

// learner is a chooser that wants to know what became of its choices. second is nil for a single engine.
type learner interface {
	chosen(q *query, first, second *target)
}

// picker chooses pairs from a set's latest snapshot.
type picker struct {
	set      *discovery.Set
	policy   Policy
	opts     *options
	chooser  chooser
	learner  learner
	rests    rests
	restDone func(*pdflow.Outcome)
	picks    atomic.Uint64
	queries  sync.Pool
	tickets  sync.Pool

	views atomic.Pointer[views]
	mu    sync.Mutex // of what makes and drops tables
	snap  *discovery.Snapshot
	known registry
}

// New returns a picker that chooses pairs from the set's latest snapshot by the policy; the zero Policy is [InTurn].
//
// Who can meet whom is found once per snapshot and connector: a prefill and a decode engine
//   - of one group, "" being a group too,
//   - of one model and engine version, as far as both are known,
//   - that both run the asking flow's connector, as far as their attributes connector tell: names, or engines' class names, separated by
//     commas. The connector http, which transfers nothing, goes with any; for a caller that names no connector they must have one in common;
//   - with an element in common in their lists kvNetwork, if both have one,
//   - by the connector's own rules ([connector.Traits]) and those of [WithRules].
//
// Flows of several connectors (a rollout, a fallback) share a picker, and thereby the loads and all that is remembered of engines. It
// keeps tables for the 16 connectors that were used last. One that cannot be compared counts as the same as others of its type and name:
// let connectors be pointers. Engines that serve a whole request do so for any connector.
//
// Whatever the policy, engines that failed this request are avoided; one that failed
// any rests for a second, longer if it fails again, and so does a pair that left an orphan; all of that only while others are there.
// An engine whose attribute dpSize is 2 to 1,024 counts as so many targets: the pick names the rank on each leg. An error says what the
// nearest prefill and decode engines lack to meet, and names neither.
//
// A pick takes time that does not grow with the number of engines, or with its logarithm, and allocates nothing, as long as not nearly
// all engines rest. A snapshot of more than 256 endpoints is taken over beside the picks, which go on with the last one for the
// milliseconds that this takes.
//
// Pick.Done must be called: the policies that look at load count a request until then, on the prefill engine until PrefillDone.
func New(set *discovery.Set, policy Policy, opts ...Option) pdflow.Picker {
	if policy.make == nil {
		policy = InTurn()
	}
	p := &picker{set: set, policy: policy, opts: newOptions(opts)}
	p.chooser = policy.make(p.opts)
	p.learner, _ = p.chooser.(learner)
	p.restDone = p.rests.done
	p.known.seed = p.opts.seed
	p.views.Store(&views{})
	return p
}

// RoundRobin is [New] with [InTurn].
func RoundRobin(set *discovery.Set) pdflow.Picker { return New(set, InTurn()) }

// Changed is closed at the set's next snapshot.
func (p *picker) Changed() <-chan struct{} { return p.set.Changed() }

// Pick does not block.
func (p *picker) Pick(_ context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	v := p.view(in)
	t := p.load(v)
	choice, ok := p.pick(t, in)
	if !ok && t.snap != p.set.Load() { // the newer snapshot may have what this one lacks
		t = p.rebuild(v)
		choice, ok = p.pick(t, in)
	}
	if !ok {
		return pdflow.Pick{}, t.notReady(in, v.pairing)
	}
	return choice, nil
}

func (p *picker) pick(t *table, in *pdflow.PickInput) (out pdflow.Pick, ok bool) {
	from := t.part(in)
	l, single := from.candidates(in)
	if len(l.targets) == 0 {
		return out, false
	}
	q := p.query(in, single)
	defer p.release(q)
	first := p.choose(l, q)
	if first == nil {
		return out, false
	}
	var second *target
	if !single {
		q.peer = first
		second = p.choose(first.peers, q)
		q.peer = nil
	}
	prefill, decode := second, first
	if first.leg == prefillLeg {
		if prefill, decode = first, second; second == nil { // of role both, and alone: it serves the whole request
			prefill, decode = nil, first
		}
	}
	out.Decode, out.DecodeRank = *decode.endpoint, connector.RankOf(int(decode.rank))
	if prefill != nil {
		out.Prefill, out.PrefillRank = *prefill.endpoint, connector.RankOf(int(prefill.rank))
	}
	if in.Encode > 0 && !single {
		out.Encode = encoders(from.encodes, q)
	}
	if p.learner != nil {
		p.learner.chosen(q, first, second)
	}
	if out.Done = p.restDone; p.policy.needs.loads {
		t := p.ticket(q, prefill, decode)
		out.Done, out.PrefillDone = t.done, t.ended
	}
	return out, true
}

// candidates returns the engines of which one is chosen first. single is true if it serves the whole request.
func (p *part) candidates(in *pdflow.PickInput) (l *list, single bool) {
	switch {
	case !in.Single && (!in.Both || len(p.pairs.targets) > 0):
		return p.pairs, false
	case in.Both:
		return p.boths, true
	}
	return p.singles, true
}

// Ready tells, without choosing, whether Pick would find engines for a request.
func (p *picker) Ready(in *pdflow.PickInput) error {
	v := p.view(in)
	t := p.rebuild(v)
	from := t.part(in)
	switch l, single := from.candidates(in); {
	case t.snap.Version == 0:
		return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: "the engines are not known yet"}
	case len(l.targets) == 0:
		return t.notReady(in, v.pairing)
	case in.Encode > 0 && !single && len(from.encodes) == 0:
		return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: "no encode engine is ready"}
	}
	return nil
}

// choose takes the policy's choice if that is good, else the best there is.
func (p *picker) choose(l *list, q *query) *target {
	if t := p.chooser.choose(l, q); t != nil && q.rank(t) == good {
		return t
	}
	return q.scan(l)
}

func (p *picker) query(in *pdflow.PickInput, single bool) *query {
	q, _ := p.queries.Get().(*query)
	if q == nil {
		q = &query{opts: p.opts, rests: &p.rests}
	}
	q.in, q.single, q.clean = in, single, len(in.Avoid) == 0 && p.rests.n.Load() == 0
	q.turn = p.picks.Add(1) - 1
	q.random = p.opts.seed + scramble(q.turn)
	if p.policy.needs.loads {
		q.cost = costOf(in.Request)
		if single {
			q.cost[decodeLeg] += q.cost[prefillLeg]
		}
	}
	return q
}

func (p *picker) release(q *query) {
	q.in, q.peer, q.memo = nil, nil, nil
	p.queries.Put(q)
}

// encoders takes engines in turn, as many as are wanted and there: good ones, else whatever there is.
func encoders(all []*discovery.Endpoint, q *query) []discovery.Endpoint {
	want := min(q.in.Encode, len(all))
	chosen := make([]discovery.Endpoint, 0, want)
	for rank := good; rank <= avoided && len(chosen) == 0; rank++ {
		for i := 0; i < len(all) && len(chosen) < want; i++ {
			e := all[(q.turn+uint64(i))%uint64(len(all))]
			if q.rankAlone(&target{endpoint: e}) == rank {
				chosen = append(chosen, *e)
			}
		}
	}
	return chosen
}

// besideAbove is the number of endpoints from which a table takes longer to make than a pick may.
const besideAbove = 256

// load returns the view's table of the latest snapshot, or of the one before while a large one is being taken over.
func (p *picker) load(v *view) *table {
	snap, t := p.set.Load(), v.table.Load()
	switch {
	case t.snap == snap:
		return t
	case len(snap.Endpoints) <= besideAbove:
		return p.rebuild(v)
	}
	if v.building.CompareAndSwap(false, true) {
		go func() {
			defer v.building.Store(false)
			p.rebuild(v)
		}()
	}
	return t
}

func (p *picker) rebuild(v *view) *table {
	p.mu.Lock()
	defer p.mu.Unlock()
	if v.gone {
		v = p.enter(v.key, v.pairing)
	}
	if t := v.table.Load(); t.snap == p.set.Load() {
		return t
	}
	return p.take(v)
}

// take brings a view to the latest snapshot. The lock is held.
func (p *picker) take(v *view) *table {
	snap, old := p.set.Load(), v.table.Load()
	loads := p.policy.needs.loads
	if p.snap != snap {
		p.snap = snap
		if p.age(); loads {
			p.known.follow(snap)
		}
	}
	t := newTable(snap, old, p.opts, &p.policy, v, &p.known)
	if loads { // while both tables are in use, loads are counted in both: neither sends everybody to an engine whose load it does not see grow
		t.join()
	}
	if v.table.Store(t); old != nil {
		old.leave()
	}
	return t
}
