// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

func loaded(n int) *list {
	targets := make([]*target, n)
	for i := range targets {
		targets[i] = &target{endpoint: &discovery.Endpoint{ID: strconv.Itoa(i)}, rank: -1,
			slot: &slot{id: uint32(i + 1), hash: hashBytes(1, []byte(strconv.Itoa(i)))}}
	}
	l := newList(targets, nil, needs{loads: true, tree: true, ring: true})
	for i, t := range targets {
		t.slot.cur = []member{{l, int32(i)}}
	}
	l.tree.play()
	return l
}

func alone() *query {
	return &query{in: &pdflow.PickInput{Single: true}, clean: true, cooldowns: &cooldowns{}, opts: newOptions(nil)}
}

func TestTheTreeKnowsTheLeastLoaded(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{1, 2, 3, 5, 8, 13, 100} {
		l := loaded(n)
		for range 500 {
			l.targets[r.IntN(n)].slot.add(int64(r.IntN(100)))
			least := l.tree.least(alone()).slot.load.Load()
			for _, x := range l.targets {
				require.GreaterOrEqual(t, x.slot.load.Load(), least)
			}
		}
		sum := int64(0)
		for _, x := range l.targets {
			sum += x.slot.load.Load()
		}
		require.Equal(t, sum, l.total.Load())
	}
}

func TestTheTreeGoesAroundWhatIsNotGood(t *testing.T) {
	l := loaded(60)
	for i, x := range l.targets {
		x.slot.add(int64(i))
	}
	q := alone()
	q.clean = false
	for i := range 20 {
		q.in.Avoid = append(q.in.Avoid, strconv.Itoa(i))
	}
	require.Equal(t, "20", l.tree.least(q).endpoint.ID)
}

// If concurrent changes leave the tree inconsistent, the next change repairs it.
func TestTheTreeIsRightAgainAfterRaces(t *testing.T) {
	l := loaded(64)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 2000 {
				x := l.tree.least(alone())
				x.slot.add(10)
				x.slot.add(-10)
			}
		})
	}
	wg.Wait()
	require.Zero(t, l.total.Load())
	for _, x := range l.targets {
		x.slot.add(5)
	}
	l.targets[17].slot.add(-1)
	require.Equal(t, "17", l.tree.least(alone()).endpoint.ID)
}

func TestTheRingIsNearlyEvenAndConsistent(t *testing.T) {
	l := loaded(20)
	n := map[string]int{}
	home := map[uint64]string{}
	for i := range uint64(20_000) {
		key := scramble(i)
		home[key] = l.ring.find(l, key, alone()).endpoint.ID
		n[home[key]]++
	}
	for id, k := range n {
		require.InDelta(t, 1000, k, 400, id)
	}
	fewer := &list{targets: l.targets[:19]}
	fewer.ring = newRing(fewer.targets)
	for key, id := range home {
		if id != "19" {
			require.Equal(t, id, fewer.ring.find(fewer, key, alone()).endpoint.ID)
		}
	}
}

func TestANodeForgetsTheEngineThatWasLongestAgo(t *testing.T) {
	p := newPrefixes(newOptions(nil))
	for _, slot := range []uint32{1, 2, 3, 1, 4} {
		p.own(77, slot)
	}
	owners, known := p.owners(77)
	require.True(t, known)
	require.Equal(t, [ownersMost]uint32{4, 1, 3}, owners)
	_, known = p.owners(78)
	require.False(t, known)
}
