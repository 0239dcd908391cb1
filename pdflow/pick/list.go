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

// target is what a policy chooses: one data-parallel rank of one engine, or an engine whose ranks nobody tells apart.
type target struct {
	endpoint *discovery.Endpoint
	rank     int32 // -1: not told apart
	leg      leg
	lonely   bool  // among its peers is nobody but its own engine
	peers    *list // of the other leg, all that it can meet; nil on the second leg
	slot     *slot // nil if the policy needs no loads
}

// list is targets to choose from, with what the policy looks up. All but the counters stays as it was made.
type list struct {
	targets  []*target
	engines  int            // distinct ones
	position *atomic.Uint64 // counts on over snapshots
	total    atomic.Int64   // tokens in flight on all targets

	tree    *tree
	ring    ring
	weights []uint64         // of targets up to and with this one
	zones   map[string]*list // with nothing of their own but targets
	index   map[uint32]int32 // targets by slot
}

// needs is what a policy wants to find ready in lists.
type needs struct {
	loads, tree, ring, weights, zones bool
	index, indexPeers                 bool // of what is chosen first, of the other leg
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

// byRank puts all first ranks before all second ones, so that round robin goes from engine to engine.
func byRank(targets []*target) []*target {
	if slices.ContainsFunc(targets, func(t *target) bool { return t.rank > 0 }) {
		slices.SortStableFunc(targets, func(a, b *target) int { return int(max(a.rank, 0) - max(b.rank, 0)) })
	}
	return targets
}

// mean is the load of the average target.
func (l *list) mean() int64 { return l.total.Load() / int64(max(len(l.targets), 1)) }
