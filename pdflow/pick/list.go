// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"slices"
	"sync/atomic"

	"github.com/pdkit/pdkit/discovery"
)

// leg is the side of a pair.
type leg int

const (
	prefillLeg leg = iota
	decodeLeg
)

func (l leg) other() leg { return 1 - l }

// target is what a policy chooses: one data-parallel rank of one engine, or a whole engine if its ranks are not known.
type target struct {
	endpoint *discovery.Endpoint
	rank     int32 // behind the engine's URL; -1: the engine's ranks are not known
	start    int32 // the first rank behind the URL, among those of the whole engine
	leg      leg
	lonely   bool  // its only possible peer is its own engine
	peers    *list // all targets of the other leg that it can form a pair with; nil on the second leg
	slot     *slot // nil if the policy needs no loads
	context  int64 // tokens; 0: not known
}

// list is the targets that a policy chooses from, with the indexes that the policy needs. Only its counters change.
type list struct {
	targets  []*target
	engines  int            // how many different engines
	position *atomic.Uint64 // of round robin; it goes on when a new snapshot replaces the list
	total    atomic.Int64   // tokens in flight on all targets

	tree    *tree
	ring    ring
	weights []uint64         // running sums: entry i is the weights of targets 0 to i
	zones   map[string]*list // these lists have targets and no indexes
	index   map[uint32]int32 // targets by slot
	named   engines
}

// needs says which indexes a policy wants in its lists.
type needs struct {
	loads, tree, ring, weights, zones bool
	index, indexPeers                 bool // index for the leg that is chosen first, indexPeers for the other
}

func newList(targets []*target, position *atomic.Uint64, n needs) *list {
	l := &list{targets: targets, position: position}
	for _, t := range targets {
		if t.rank <= 0 {
			l.engines++
		}
	}
	if n.tree {
		l.tree = newTree(targets)
	}
	if n.ring {
		l.ring = newRing(targets)
	}
	if n.weights {
		l.weigh()
	}
	if n.zones {
		l.zones = map[string]*list{}
		for _, t := range targets {
			z := l.zones[t.endpoint.Zone]
			if z == nil {
				z = &list{position: position}
				l.zones[t.endpoint.Zone] = z
			}
			z.targets = append(z.targets, t)
		}
	}
	if n.index {
		l.index = make(map[uint32]int32, len(targets))
		for i, t := range targets {
			l.index[t.slot.id] = int32(i)
		}
	}
	return l
}

// byRank puts rank 0 of all engines before rank 1 of all engines, so that round robin goes from engine to engine.
func byRank(targets []*target) []*target {
	if slices.ContainsFunc(targets, func(t *target) bool { return t.rank > 0 }) {
		slices.SortStableFunc(targets, func(a, b *target) int { return int(max(a.rank, 0) - max(b.rank, 0)) })
	}
	return targets
}

// mean is the average load of a target, in tokens.
func (l *list) mean() int64 { return l.total.Load() / int64(max(len(l.targets), 1)) }
