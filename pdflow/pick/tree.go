// SPDX-License-Identifier: Apache-2.0

package pick

import "sync/atomic"

// tree finds the least loaded target of a list in logarithmic time. It is a tournament: each node holds the index of
// the least loaded target below it. It needs no lock. If two updates race, a node may keep an index that is no longer
// right, until the next update below that node.
type tree struct {
	targets []*target
	nodes   []atomic.Int32 // from 1; the leaf of target i is len(targets)+i
}

// searchMost bounds a search among engines in a cooldown. A search that reaches it gives up, and the caller searches
// another way.
const searchMost = 256

func newTree(targets []*target) *tree {
	t := &tree{targets: targets, nodes: make([]atomic.Int32, 2*len(targets))}
	for i := range targets {
		t.nodes[len(targets)+i].Store(int32(i))
	}
	return t
}

// play sets all nodes.
func (t *tree) play() {
	for node := len(t.targets) - 1; node >= 1; node-- {
		t.nodes[node].Store(t.better(t.nodes[2*node].Load(), t.nodes[2*node+1].Load()))
	}
}

// update sets the nodes above a target whose load has changed.
func (t *tree) update(i int) {
	for node := (len(t.targets) + i) / 2; node >= 1; node /= 2 {
		t.nodes[node].Store(t.better(t.nodes[2*node].Load(), t.nodes[2*node+1].Load()))
	}
}

// better returns the less loaded of two. Of two equal loads it takes the engine that has served less, so that an idle
// fleet is used evenly.
func (t *tree) better(a, b int32) int32 {
	if b < 0 || a == b {
		return a
	}
	if a < 0 {
		return b
	}
	x, y := t.targets[a], t.targets[b]
	lx, ly := x.slot.load.Load(), y.slot.load.Load()
	if lx == ly {
		lx, ly = x.slot.served.Load(), y.slot.served.Load()
	}
	if ly < lx || ly == lx && b < a {
		return b
	}
	return a
}

// least returns the least loaded target that is good for the query; nil if the search reached searchMost.
func (t *tree) least(q *query) *target {
	if len(t.targets) == 0 {
		return nil
	}
	budget := searchMost
	if i := t.search(1, q, &budget); i >= 0 {
		return t.targets[i]
	}
	return nil
}

func (t *tree) search(node int, q *query, budget *int) int32 {
	if *budget--; *budget < 0 {
		return -1
	}
	w := t.nodes[node].Load()
	if q.rank(t.targets[w]) == good {
		return w
	}
	if node >= len(t.targets) {
		return -1
	}
	return t.better(t.search(2*node, q, budget), t.search(2*node+1, q, budget))
}

// some adds the least loaded target, and the winners beside its way through the tournament, of which one is the next
// one, until to has most. Of the others it may miss some that are less loaded.
func (t *tree) some(q *query, l *list, to []place, most int) []place {
	if len(t.targets) < 2 || len(to) >= most {
		return to
	}
	var beside [32]int32
	n := 0
	winner := t.nodes[1].Load()
	to = add(to, q, l, t.targets[winner])
	for node := len(t.targets) + int(winner); node > 1 && n < len(beside); node /= 2 {
		beside[n] = t.nodes[node^1].Load()
		n++
	}
	for n > 0 && len(to) < most {
		best := 0
		for i := 1; i < n; i++ {
			if t.better(beside[best], beside[i]) == beside[i] {
				best = i
			}
		}
		to = add(to, q, l, t.targets[beside[best]])
		n--
		beside[best] = beside[n]
	}
	return to
}
