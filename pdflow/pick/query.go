// SPDX-License-Identifier: Apache-2.0

package pick

import "github.com/pdkit/pdkit/pdflow"

// How good a target is for an attempt: a picker takes the best that is there, so that the last engines of a role are
// used whatever they have done.
const (
	good        = iota
	coolingDown // the engine is in a cooldown, or the pair is, or all engines that it could meet are
	avoided     // it failed this very request, or all that it could meet did
	lonely      // it can meet nobody and would serve the whole request
	never       // the same engine as the other leg's
)

// query is one pick's state. It is pooled: policies must not keep it.
type query struct {
	in        *pdflow.PickInput
	single    bool // one engine serves the whole request
	opts      *options
	cooldowns *cooldowns
	clean     bool // nothing is in a cooldown and nothing is to be avoided: the common case
	random    uint64
	number    uint64  // of the pick, counted by the picker
	peer      *target // what was chosen for the other leg, nil while the first is
	cost      [2]int64

	prompt prompt

	memo     *list // a list none of whose engines is good by itself
	memoRank int
}

// next returns the next random number: they follow from the seed and the number of the pick.
func (q *query) next() uint64 {
	q.random += mixA
	return scramble(q.random)
}

// below returns a random number from 0 to n-1.
func (q *query) below(n int) int { return int(q.next() >> 1 % uint64(n)) }

// rank says how good a target is.
func (q *query) rank(t *target) int {
	switch {
	case q.peer != nil:
		return q.rankWith(t, q.peer)
	case q.single:
		return q.rankAlone(t)
	case t.lonely:
		return lonely
	case q.clean:
		return good
	}
	own := q.rankAlone(t)
	if own == avoided {
		return own
	}
	return max(own, q.rankPeers(t))
}

func (q *query) rankAlone(t *target) int {
	switch {
	case q.clean:
		return good
	case q.in.Avoids(t.endpoint.ID):
		return avoided
	case q.cooldowns.engineCooling(t.endpoint.ID):
		return coolingDown
	}
	return good
}

// rankWith ranks t beside the engine that was chosen for the other leg, or may be.
func (q *query) rankWith(t, peer *target) int {
	if t.endpoint.ID == peer.endpoint.ID {
		return never
	}
	if q.clean {
		return good
	}
	r := q.rankAlone(t)
	p, d := t, peer
	if t.leg == decodeLeg {
		p, d = peer, t
	}
	if r == good && q.cooldowns.pairCooling(p.endpoint.ID, d.endpoint.ID) {
		return coolingDown
	}
	return r
}

// rankPeers returns the rank of the best engine that t can meet; nearly always that is the first one.
func (q *query) rankPeers(t *target) int {
	if t.peers == q.memo {
		return q.memoRank
	}
	best, alone := never, never
	for _, p := range t.peers.targets {
		if best = min(best, q.rankWith(p, t)); best == good {
			return good
		}
		alone = min(alone, q.rankAlone(p))
	}
	if alone > good { // not for t's sake: it holds for all that have these peers
		q.memo, q.memoRank = t.peers, alone
	}
	return best
}

// over reports whether a target has more than its share of its list's load, so that a policy that prefers it looks
// elsewhere.
func (q *query) over(l *list, t *target) bool {
	return float64(t.slot.load.Load()-q.opts.slack) > q.opts.bound*float64(l.mean())
}

// sampleMost bounds the search for a good target by chance; what it misses, scan finds.
const sampleMost = 16

// sample returns a random good target, nil if chance finds none.
func (q *query) sample(l *list) *target {
	for range sampleMost {
		if t := l.targets[q.below(len(l.targets))]; q.rank(t) == good {
			return t
		}
	}
	return nil
}

// lighter returns the less loaded of two random targets: nearly as even as the least loaded of all, without a queue of
// all.
func (q *query) lighter(l *list) *target {
	n := len(l.targets)
	if n == 0 {
		return nil
	}
	if n == 1 {
		return l.targets[0]
	}
	i := q.below(n)
	a, b := l.targets[i], l.targets[(i+1+q.below(n-1))%n]
	if q.rank(a) != good {
		a = q.sample(l)
	}
	if q.rank(b) != good {
		b = q.sample(l)
	}
	if a == nil || b != nil && lessLoaded(b, a) {
		return b
	}
	return a
}

// lessLoaded prefers, of equals, the one that has served less.
func lessLoaded(a, b *target) bool {
	x, y := a.slot.load.Load(), b.slot.load.Load()
	return x < y || x == y && a.slot.served.Load() < b.slot.served.Load()
}

// from returns the first good target from place n on, nil if none is near, and how many it passed over.
func (q *query) from(l *list, n uint64) (t *target, skipped uint64) {
	for i := range uint64(sampleMost) {
		if t := l.targets[(n+i)%uint64(len(l.targets))]; q.rank(t) == good {
			return t, i
		}
	}
	return nil, 0
}

// scan looks at all targets and returns the first good one, else the one with the best rank. A pick comes here only if
// it found cooldowns, engines to avoid or engines without a peer.
func (q *query) scan(l *list) *target {
	var best *target
	rank := never
	start := q.below(len(l.targets))
	for i := range l.targets {
		t := l.targets[(start+i)%len(l.targets)]
		if r := q.rank(t); r < rank {
			if best, rank = t, r; r == good {
				break
			}
		}
	}
	return best
}
