// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"slices"
	"strconv"
)

type roundRobin struct{}

// choose returns the next good target, and moves the list's position behind it. The position also moves past targets
// that choose skipped. Otherwise the target behind a skipped one would be chosen twice, and an engine of role both,
// which is skipped while it is the decode engine itself, might never be chosen.
func (roundRobin) choose(l *list, q *query) *target {
	t, skipped := q.from(l, l.position.Add(1)-1)
	if skipped > 0 {
		l.position.Add(skipped)
	}
	return t
}

type random struct{}

func (random) choose(l *list, q *query) *target { return q.sample(l) }

type leastLoad struct{}

func (leastLoad) choose(l *list, q *query) *target {
	if l.tree == nil { // the ranks of a named engine
		return q.lighter(l)
	}
	return l.tree.least(q)
}

type twoChoices struct{}

func (twoChoices) choose(l *list, q *query) *target { return q.lighter(l) }

type weighted struct{}

const (
	weightUsual = 100
	weightMost  = 1_000_000
)

// weigh adds the weights up, so that a binary search finds the target of a random number.
func (l *list) weigh() {
	l.weights = make([]uint64, len(l.targets))
	sum := uint64(0)
	for i, t := range l.targets {
		w, err := strconv.ParseUint(t.endpoint.Attribute("weight"), 10, 32)
		if err != nil {
			w = weightUsual
		}
		sum += min(w, weightMost)
		l.weights[i] = sum
	}
}

func (weighted) choose(l *list, q *query) *target {
	if l.weights == nil { // the ranks of a named engine
		return q.sample(l)
	}
	sum := l.weights[len(l.weights)-1]
	if sum == 0 {
		return q.sample(l)
	}
	for range sampleMost {
		i, _ := slices.BinarySearch(l.weights, q.next()>>1%sum+1)
		if t := l.targets[i]; q.rank(t) == good {
			return t
		}
	}
	return nil
}

type session struct {
	header string
	seed   uint64
}

func (s *session) choose(l *list, q *query) *target {
	v := q.in.Header[s.header]
	if len(v) == 0 || v[0] == "" {
		return q.lighter(l)
	}
	if t := l.ring.find(l, hashBytes(s.seed, []byte(v[0])), q); t != nil {
		return t
	}
	return q.lighter(l)
}

type zoneFirst struct{ zone string }

func (z zoneFirst) choose(l *list, q *query) *target {
	zone := z.zone
	if q.peer != nil {
		zone = q.peer.endpoint.Zone
	}
	if near := l.zones[zone]; zone != "" && near != nil {
		if t := q.lighter(near); t != nil && q.rank(t) == good && !q.over(l, t) {
			return t
		}
	}
	return q.lighter(l)
}

// metMost is how many prefill engines a decode engine remembers that it met: enough for a second choice when one is
// busy or in a cooldown.
const metMost = 4

type sticky struct{}

func (sticky) choose(l *list, q *query) *target {
	if q.peer == nil {
		return q.lighter(l)
	}
	var best *target
	for i := range q.peer.slot.met {
		if n, ok := l.index[q.peer.slot.met[i].Load()]; ok {
			if t := l.targets[n]; q.rank(t) == good && !q.over(l, t) && (best == nil || lessLoaded(t, best)) {
				best = t
			}
		}
	}
	if best != nil {
		return best
	}
	return q.lighter(l)
}

// chosen remembers the pair at the time of the pick, since that is when its engines begin to exchange addresses.
func (sticky) chosen(q *query, first, second *target) {
	if second == nil {
		return
	}
	met, id := &first.slot.met, second.slot.id
	free := q.below(metMost)
	for i := range met {
		switch met[i].Load() {
		case id:
			return
		case 0:
			free = i
		}
	}
	met[free].Store(id)
}
