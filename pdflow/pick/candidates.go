// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// CandidatesMost is how many engines of each role [Candidates] has.
const CandidatesMost = 8

const (
	asidesMost = 2 // engines that serve alone where others never do: see connector.Serving.PairOnly
	cachedMost = 3 // of the candidates, those with most of the prompt
	randomMost = 2 // so that no good engine is overlooked for ever, and several gateways do not choose the same ones
)

// Candidates are engines of which one pick can be made: see [WithCandidates]. Use one again and again: the memory of
// its lists is kept.
type Candidates struct {
	// What the caller asks for. Random makes the choice of the candidates, and Want are IDs of engines that are to be
	// among them if they can serve.
	Random uint64
	Want   []string

	// At most CandidatesMost of each role. An engine that has both roles may be in both.
	Prefill, Decode []Candidate

	firsts, seconds []place // of the leg that the policy chooses first, and of the other one
	asides          []place // that are in no pair, or in none that is good
	matches         []match
}

// Candidate is an engine that could serve a request.
type Candidate struct {
	Endpoint *discovery.Endpoint // of the set's snapshot: read only
	// Cached are tokens of the prompt's beginning: with [PrefixAffinity] those that were sent there lately, with [KV],
	// if PickInput.Prompt is exact, those that the engines' events tell of. Exact says that its events tell all.
	Cached int
	Exact  bool
	Alone  bool // it may serve the whole request, by the connector's rules and the request's
	// Of a decode engine: bit i is set if the engine cannot be picked together with Prefill[i].
	Apart uint64
}

// place is a target among the candidates.
type place struct {
	t     *target
	peers *list // that it was found in
}

// match is an engine that lately got a beginning of the prompt, or holds one.
type match struct {
	slot   uint32
	engine string // not "": it is told by its ID, in place of slot
	rank   int
	tokens int
	exact  bool
}

// is reports whether the match is that of an engine, or of one of its ranks: the engine's candidate stands for all of
// them, and the pick then finds the rank.
func (m *match) is(x *place) bool {
	t := x.t
	switch {
	case m.engine != "":
		return t.endpoint.ID == m.engine
	case t.slot == nil || t.slot.id == m.slot:
		return t.slot != nil
	case t.rank < 0 || x.peers == nil:
		return false
	}
	at, ok := x.peers.index[m.slot]
	return ok && x.peers.targets[at].endpoint == t.endpoint
}

// in returns the match's target in a list; nil if it has none.
func (m *match) in(l *list) *target {
	if m.engine == "" {
		if at, ok := l.index[m.slot]; ok {
			return l.targets[at]
		}
		return nil
	}
	if some := l.of(m.engine); some != nil {
		for _, t := range some.targets {
			if t.is(m.rank) {
				return t
			}
		}
	}
	return nil
}

// matcher is a chooser that knows which engines got a beginning of a prompt, or hold one.
type matcher interface {
	match(q *query, c *Candidates)
}

// WithCandidates lets the picker say which engines it could choose (method Candidates), as package decide asks for.
// Then every policy counts loads, and [PrefixAffinity] remembers decode engines, too: they keep the KV that they fetch.
func WithCandidates() Option { return func(o *options) { o.candidates = true } }

// Candidates fills c with engines of which Pick could choose a pair, or one to serve alone: those that are good for the
// request, that is no engines to avoid, none at its limit, and none in a cooldown. Where a role has more than
// CandidatesMost, it takes up to three of those that have most of the prompt, then the least loaded, and two by chance.
// Where no pair is good, Decode has the engines that may serve alone, and Prefill none. A request that may be picked
// for one engine only, or whose engines are not good, has no candidates: then Pick decides.
// Nothing that Pick does depends on it. Without [WithCandidates] it returns false.
func (p *picker) Candidates(in *pdflow.PickInput, c *Candidates) (tells bool) {
	c.Prefill, c.Decode, c.firsts, c.seconds = c.Prefill[:0], c.Decode[:0], c.firsts[:0], c.seconds[:0]
	c.asides, c.matches = c.asides[:0], c.matches[:0]
	if !p.opts.candidates || in.Single {
		return p.opts.candidates
	}
	t := p.load()
	from := t.loaded(in, p.pairing.serving)
	if from == nil {
		from = t.part(in)
	}
	all, single := from.candidates(in, p.pairing.serving)
	l, other := p.named(all, in, single)
	if single {
		return true
	}
	q := p.peek(in, from.room(in), c.Random)
	defer p.release(q)
	q.second = other
	if m, ok := p.chooser.(matcher); ok {
		m.match(q, c)
	}
	room := CandidatesMost
	if p.pairing.serving.PairOnly && len(from.boths.targets) > 0 && in.Prefill == "" && in.Decode == "" {
		q.single = true
		c.asides = c.some(c.asides, q, from.boths, asidesMost)
		q.single = false
		room -= len(c.asides)
	}
	if l != nil {
		c.firsts = c.some(c.firsts, q, l, room)
	}
	if c.partners(q, other, room); len(c.firsts) == 0 {
		c.alone(q, t, p.pairing.serving)
	}
	c.fill(p, q)
	return true
}

// alone adds decode engines that may serve the request alone, where no pair can.
func (c *Candidates) alone(q *query, t *table, serving connector.Serving) {
	if serving.PairOnly || q.in.Prefill != "" || q.in.Encode > 0 {
		return
	}
	in := *q.in
	in.Single = true
	from := t.loaded(&in, serving)
	if from == nil {
		from = t.part(&in)
	}
	l, _ := from.candidates(&in, serving)
	if in.Decode != "" {
		l = l.of(in.Decode)
	}
	if l != nil {
		q.single, q.second = true, ""
		c.asides = c.some(c.asides, q, l, CandidatesMost)
	}
}

// peek is a query that leaves the picker's own numbers as they are.
func (p *picker) peek(in *pdflow.PickInput, room [2]int64, random uint64) *query {
	q, _ := p.queries.Get().(*query)
	if q == nil {
		q = &query{opts: p.opts, cooldowns: &p.cooldowns}
	}
	q.in, q.single, q.room, q.number, q.random, q.roll = in, false, room, 0, random, random
	if in.Request != nil {
		q.missing = p.cooldowns.missing.engines(in.Request.Model)
	}
	q.clean = len(in.Avoid) == 0 && q.missing == nil && room == [2]int64{} && p.cooldowns.n.Load() == 0
	return q
}

// some adds up to n engines of a list.
func (c *Candidates) some(to []place, q *query, l *list, n int) []place {
	most := len(to) + n
	if l.engines <= n { // the first targets of a list are of different engines: see byRank
		for _, t := range l.targets[:l.engines] {
			to = add(to, q, l, t)
		}
		return to
	}
	for _, id := range c.Want {
		if some := l.of(id); some != nil && len(to) < most-randomMost {
			to = add(to, q, l, some.targets[0])
		}
	}
	for cached, i := 0, 0; i < len(c.matches) && cached < min(cachedMost, n/2); i++ {
		if t := c.matches[i].in(l); t != nil {
			to, cached = add(to, q, l, t), cached+1
		}
	}
	to = l.tree.some(q, l, to, most-min(randomMost, n/2))
	for range 2 * n {
		if len(to) == most {
			break
		}
		to = add(to, q, l, l.targets[q.below(len(l.targets))])
	}
	return to
}

// add adds a target that is good, unless its engine is there.
func add(to []place, q *query, l *list, t *target) []place {
	if has(to, t.endpoint) || !q.fits(t) {
		return to
	}
	return append(to, place{t, l})
}

// fits reports whether an engine is good, or named.
func (q *query) fits(t *target) bool {
	if id := t.endpoint.ID; id == q.in.Decode && t.leg == decodeLeg || id == q.in.Prefill && t.leg == prefillLeg {
		return true
	}
	if t.peers == nil || q.single {
		return q.rankAlone(t) == good
	}
	return q.rank(t) == good
}

func has(places []place, e *discovery.Endpoint) bool {
	for i := range places {
		if places[i].t.endpoint == e {
			return true
		}
	}
	return false
}

// partners adds engines of the other leg, from each list of partners that the first ones have.
func (c *Candidates) partners(q *query, named string, room int) {
	lists := 0
	for i := range c.firsts {
		if c.newPeers(i) {
			lists++
		}
	}
	for i := range c.firsts {
		if !c.newPeers(i) {
			continue
		}
		l := c.firsts[i].t.peers
		if named != "" {
			if l = l.of(named); l == nil {
				continue
			}
		}
		share := (room - len(c.seconds) + lists - 1) / lists
		lists--
		if share > 0 {
			c.seconds = c.some(c.seconds, q, l, share)
		}
	}
}

// newPeers reports whether no engine before the i-th has its list of partners.
func (c *Candidates) newPeers(i int) bool {
	for k := range i {
		if c.firsts[k].t.peers == c.firsts[i].t.peers {
			return false
		}
	}
	return true
}

// fill writes the lists of the caller.
func (c *Candidates) fill(p *picker, q *query) {
	ps, ds := c.seconds, c.firsts
	if p.policy.first == prefillLeg {
		ps, ds = ds, ps
	}
	serving := p.pairing.serving
	for _, x := range ps {
		e := x.t.endpoint
		alone := e.Role.Has(discovery.RoleDecode) && servesAlone(e, serving) && q.in.Encode == 0 &&
			(q.in.Decode == "" || q.in.Decode == e.ID) && (x.t.context == 0 || q.room[decodeLeg] <= x.t.context)
		y := c.candidate(&x)
		y.Alone = alone
		c.Prefill = append(c.Prefill, y)
	}
	for _, x := range ds {
		e := x.t.endpoint
		alone := servesAlone(e, serving) && q.in.Encode == 0 && (q.in.Prefill == "" || q.in.Prefill == e.ID)
		y := c.candidate(&x)
		y.Alone = alone
		for i := range ps {
			if !q.together(&ps[i], &x) {
				y.Apart |= 1 << i
			}
		}
		c.Decode = append(c.Decode, y)
	}
	for _, x := range c.asides {
		y := c.candidate(&x)
		y.Alone, y.Apart = q.in.Encode == 0, 1<<len(ps)-1
		c.Decode = append(c.Decode, y)
	}
}

// together reports whether two engines can be picked together.
func (q *query) together(p, d *place) bool {
	if p.t.endpoint == d.t.endpoint {
		return false
	}
	first, second := d, p
	if p.t.peers != nil {
		first, second = p, d
	}
	if first.t.peers != second.peers && first.t.peers.of(second.t.endpoint.ID) == nil {
		return false
	}
	return q.clean || q.cooldowns.pair(p.t.endpoint.ID, d.t.endpoint.ID, q.roll) == good
}

// candidate returns what is told of a place.
func (c *Candidates) candidate(x *place) Candidate {
	out := Candidate{Endpoint: x.t.endpoint}
	for i := range c.matches {
		if m := &c.matches[i]; m.is(x) {
			out.Cached, out.Exact = m.tokens, m.exact
			break
		}
	}
	return out
}
