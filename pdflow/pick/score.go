// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"math"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// scoredMost is how many engines of each role are scored for one pick: all pairs of 64 engines are 4,096.
const scoredMost = 64

// Score chooses the pair to which a function of the host gives the highest score. Which engines can be chosen is the
// picker's: those that are ready and form a pair by the rules, failed nothing, are in no cooldown, have the adapter,
// and so on. So the function scores, and need not look at the fields of in that say who may serve.
//
// The function is called for each pair of a prefill engine p and a decode engine d, for at most 64 engines of each role
// and so at most 4,096 times for a pick; of more engines as many are taken, evenly spread from a random place on. p is
// nil where one engine is to serve the whole request. A pair that the picker does not take may be scored, too. Of equal
// scores the pair with the fewest tokens in flight is chosen, as [LeastLoad] counts them, and of those one by chance.
// NaN counts as negative infinity; no score excludes a pair, which [WithRules] does. If no engine of a role is good
// (all failed the request, or are in a cooldown), the picker takes the best of them without the function.
//
// Many goroutines call the function at once, and it must be quick and must not change or keep what it is given. If it
// panics, its request fails with [pdflow.CodeInternal]. A load of the host's own is best counted by a
// [pdflow.Observer]. Nil scores all pairs alike.
func Score(score func(in *pdflow.PickInput, p, d *discovery.Endpoint) float64) Policy {
	if score == nil {
		score = func(*pdflow.PickInput, *discovery.Endpoint, *discovery.Endpoint) float64 { return 0 }
	}
	return Policy{name: "score", first: decodeLeg, needs: needs{loads: true},
		make: func(*options) chooser { return scored(score) }}
}

type scored func(in *pdflow.PickInput, p, d *discovery.Endpoint) float64

// best is the best pair, or engine, so far.
type best struct {
	first, second *target
	score         float64
	load          int64
	equal         int // how many are as good
}

func (s scored) choose(l *list, q *query) *target {
	b := &q.best
	if q.peer != nil {
		if b.first == nil || b.first.endpoint != q.peer.endpoint { // the picker has chosen it without the function
			*b = best{}
			s.partner(l, q, q.peer)
		}
		return q.rankOf(l, b.second)
	}
	for i := range sampled(l) {
		switch d := l.at(i, q); {
		case q.rank(d) != good:
		case q.single:
			b.take(q, s(q.in, nil, d.endpoint), d, nil)
		default:
			peers := d.peers
			if q.second != "" {
				peers = peers.of(q.second)
			}
			s.partner(peers, q, d)
		}
	}
	return q.rankOf(l, b.first)
}

// partner looks in a list of prefill engines for a better pair with d.
func (s scored) partner(l *list, q *query, d *target) {
	for i := range sampled(l) {
		p := l.at(i, q)
		q.best.take(q, s(q.in, p.endpoint, d.endpoint), d, p)
	}
}

// take takes a pair, or an engine alone, if it is better than what there is.
func (b *best) take(q *query, score float64, first, second *target) {
	if math.IsNaN(score) {
		score = math.Inf(-1)
	}
	if b.equal > 0 && score < b.score {
		return
	}
	load := first.slot.load.Load()
	if second != nil {
		load += second.slot.load.Load()
	}
	equal := b.equal > 0 && score == b.score
	switch {
	case equal && load > b.load, second != nil && !q.goodWith(second, first):
		return
	case equal && load == b.load:
		if b.equal++; q.below(b.equal) > 0 {
			return
		}
	default:
		b.equal = 1
	}
	b.first, b.second, b.score, b.load = first, second, score, load
}

// goodWith reports whether p can prefill for d. A named engine is taken whatever it has done.
func (q *query) goodWith(p, d *target) bool {
	if q.second != "" {
		return p.endpoint.ID != d.endpoint.ID
	}
	return q.rankWith(p, d) == good
}

// sampled is how many engines of a list are looked at.
func sampled(l *list) int { return min(l.engines, scoredMost) }

// at returns the i-th engine that is looked at. The first targets of a list are of different engines: see byRank.
func (l *list) at(i int, q *query) *target {
	if l.engines <= scoredMost {
		return l.targets[i]
	}
	return l.targets[(int(q.roll%uint64(l.engines))+i*l.engines/scoredMost)%l.engines]
}

// rankOf returns the less loaded of two ranks of a target's engine.
func (q *query) rankOf(l *list, t *target) *target {
	if t == nil || t.rank < 0 {
		return t
	}
	return q.lighter(l.of(t.endpoint.ID))
}
