// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"context"
	"slices"

	"github.com/pdkit/pdkit/pdflow"
)

// The ranks of a target for an attempt, best first. A picker takes the best target there is, so that the last engines
// of a role are used whatever they have done.
const (
	good        = iota
	full        // the engine is well, and has as many requests as it may: see pdflow.PickInput.Full
	recovering  // the engine or the pair has had its share of picks; see cooldowns
	coolingDown // the engine is in a cooldown, or the pair is, or all engines that it could be paired with are
	avoided     // the engine failed this very request, or all engines that it could be paired with did
	lacking     // the engine has said that it does not have the model, or its context is too short for the request, or
	// either is so of all that it could be paired with
	lonely // it can be paired with no engine, and would serve the whole request
	never  // it is the engine of the other leg
)

// query is the state of one pick. It is pooled, so policies must not keep it.
type query struct {
	ctx       context.Context // of the pick, for KV, which asks for the prompt's tokens
	in        *pdflow.PickInput
	single    bool // one engine serves the whole request
	opts      *options
	cooldowns *cooldowns
	clean     bool            // nothing is in a cooldown, to be avoided or without the model: the common case
	missing   map[string]bool // engines that do not have the model; nil: none
	room      [2]int64        // tokens that an engine's context must hold, by leg; 0: any does
	random    uint64
	roll      uint64   // the same for the whole pick
	number    uint64   // of the pick, counted by the picker
	peer      *target  // the target chosen for the other leg; nil while the first leg is chosen
	second    string   // not "": the ID of the engine that the request names for the leg that is chosen second
	tellers   *tellers // with WithLoad
	best      best     // of Score: both engines, which it chooses together
	cost      [2]int64

	prompt prompt

	memo     *list // a list of peers that has no good engine
	memoRank int
}

// next returns the next random number. It follows from the seed and the pick's number.
func (q *query) next() uint64 {
	q.random += mixA
	return scramble(q.random)
}

// below returns a random number from 0 to n-1.
func (q *query) below(n int) int { return int(q.next() >> 1 % uint64(n)) }

// rank returns the rank of a target.
func (q *query) rank(t *target) int {
	switch {
	case q.peer != nil:
		return q.rankWith(t, q.peer)
	case q.single:
		return q.rankAlone(t)
	case q.second != "":
		return q.rankNamed(t)
	case t.lonely:
		return lonely
	case q.clean:
		return good
	}
	own := q.rankAlone(t)
	if own == lacking {
		return own
	}
	return max(own, q.rankPeers(t))
}

func (q *query) rankAlone(t *target) int {
	if q.clean {
		return good
	}
	id, known := t.endpoint.ID, good
	// One that has the model, and room for the prompt, may have failed just once.
	if q.missing[id] || t.context > 0 && q.room[t.leg] > t.context {
		return lacking
	}
	switch avoid := q.in.Avoids(id); {
	case avoid && slices.Contains(q.in.Full, id):
		known = full
	case avoid:
		return avoided
	}
	return max(known, q.cooldowns.engine(id, q.roll))
}

// rankWith ranks t as the partner of peer.
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
	return max(r, q.cooldowns.pair(p.endpoint.ID, d.endpoint.ID, q.roll))
}

// rankPeers returns the rank of the best partner for t. Nearly always the first peer is good.
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
	if alone > good { // independent of t, so it holds for all targets with these peers
		q.memo, q.memoRank = t.peers, alone
	}
	return best
}

// over reports whether a target has more than its share of the list's load, so that a policy that prefers it must
// choose another.
func (q *query) over(l *list, t *target) bool {
	return float64(t.slot.load.Load()-q.opts.slack) > q.opts.bound*float64(l.mean())
}

// sampleMost bounds a random search for a good target. If it finds none, the picker scans the list.
const sampleMost = 16

// sample returns a random good target, or nil if its tries find none.
func (q *query) sample(l *list) *target {
	for range sampleMost {
		if t := l.targets[q.below(len(l.targets))]; q.rank(t) == good {
			return t
		}
	}
	return nil
}

// lighter returns the less loaded of two random targets. That spreads load nearly as evenly as the least loaded of all,
// and does not send all picks to the same engine.
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

// lessLoaded compares loads; of two equal loads, that of the engine that has served less counts as less.
func lessLoaded(a, b *target) bool {
	x, y := a.slot.load.Load(), b.slot.load.Load()
	return x < y || x == y && a.slot.served.Load() < b.slot.served.Load()
}

// from returns the first good target at place n or after it, and how many it skipped; nil if the next sampleMost have
// none.
func (q *query) from(l *list, n uint64) (t *target, skipped uint64) {
	for i := range uint64(sampleMost) {
		if t := l.targets[(n+i)%uint64(len(l.targets))]; q.rank(t) == good {
			return t, i
		}
	}
	return nil, 0
}

// scan looks at all targets and returns the first good one, else the one with the best rank. Of targets with equal
// ranks it prefers the one that is better whatever its peers have done, since a bad peer hides that: where a request
// failed at a decode engine and the only prefill engine, another decode engine is to be tried. A pick comes here only
// if it found cooldowns, engines to avoid or engines without a peer.
func (q *query) scan(l *list) *target {
	var best *target
	rank := never
	start := q.below(len(l.targets))
	for i := range l.targets {
		t := l.targets[(start+i)%len(l.targets)]
		r := q.rank(t)
		if r == good {
			return t
		}
		if r < rank || r == rank && best != nil && q.rankApart(t) < q.rankApart(best) {
			best, rank = t, r
		}
	}
	return best
}

// rankApart returns the rank of a target whatever its peers have done: its own, or that of the best of its pairs.
func (q *query) rankApart(t *target) int {
	own := q.rankAlone(t)
	if q.peer != nil || q.single || own == lacking || len(t.peers.targets) == 0 {
		return own
	}
	best := never
	for _, peer := range t.peers.targets {
		p, d := t, peer
		if t.leg == decodeLeg {
			p, d = peer, t
		}
		if best = min(best, q.cooldowns.pair(p.endpoint.ID, d.endpoint.ID, q.roll)); best == good {
			break
		}
	}
	return max(own, best)
}
