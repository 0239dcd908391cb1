// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"context"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

func TestAPairThatMeetsAgainCrowdsNobodyOut(t *testing.T) {
	q, d := alone(), &target{slot: &slot{}}
	for id := uint32(1); id <= metMost; id++ {
		for range 10 {
			sticky{}.chosen(q, d, &target{slot: &slot{id: id}})
		}
	}
	met := map[uint32]bool{}
	for i := range d.slot.met {
		met[d.slot.met[i].Load()] = true
	}
	require.Equal(t, map[uint32]bool{1: true, 2: true, 3: true, 4: true}, met)
}

// The picker compares an engine's load with the total load. The totals must be exact even if requests begin and end
// while a new snapshot is taken over.
func TestTotalsFollowLoadsFromSnapshotToSnapshot(t *testing.T) {
	lists := make(chan int)
	set := discovery.NewSet(discovery.SourceFunc(func(ctx context.Context, publish func(discovery.Snapshot)) error {
		for v := uint64(1); ; v++ {
			select {
			case n := <-lists:
				var eps []discovery.Endpoint
				for i := range 2 * n {
					e, err := discovery.New("http://e"+strconv.Itoa(i)+":1",
						[]discovery.Role{discovery.RolePrefill, discovery.RoleDecode}[i%2])
					if err != nil {
						return err
					}
					eps = append(eps, e)
				}
				publish(discovery.Snapshot{Version: v, Endpoints: eps})
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = set.Run(ctx) }()
	defer func() { cancel(); <-ended }()

	p, ok := New(set, LeastLoad(), WithSeed(1)).(*picker)
	require.True(t, ok)
	flows := []*picker{p, p.bind(newPairing(nil, connector.Serving{PairOnly: true}, p.opts)), bound(p, named{"nixl"})}
	var open []func(*pdflow.Outcome)
	for round, n := range []int{5, 9, 4, 300, 2, 6} {
		changed := set.Changed()
		lists <- n
		<-changed
		for i := range 60 {
			flows[i%3].rebuild()
			x, err := flows[i%3].Pick(ctx, &pdflow.PickInput{})
			require.NoError(t, err)
			open = append(open, x.Done)
		}
		for _, done := range open[:len(open)/2] {
			done(&pdflow.Outcome{})
		}
		open = open[len(open)/2:]
		places := map[*slot]int{}
		for _, flow := range flows {
			for _, l := range flow.latest.table.Load().lists {
				sum := int64(0)
				for _, x := range l.targets {
					sum += x.slot.load.Load()
					places[x.slot]++
				}
				require.Equal(t, sum, l.total.Load(), "round %d", round)
			}
		}
		for s, n := range places {
			require.Len(t, s.cur, n, "a slot counts in lists of the current tables only")
		}
	}
}

// named is a connector of which nothing but its name matters.
type named struct{ name string }

func (n named) Traits() connector.Traits { return connector.Traits{Name: n.name} }
func (named) Prefill(context.Context, *connector.Session, *connector.Leg) error {
	return nil
}

func (named) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}
