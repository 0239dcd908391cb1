// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"
	"weak"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/pdflow"
)

// ruled is a connector with rules.
type ruled struct {
	named
	rules []attr.PairRule
}

func (r *ruled) Traits() connector.Traits { return connector.Traits{Name: r.name, PairRules: r.rules} }

// pickerOf returns a picker and what gives it another list.
func pickerOf(t *testing.T, policy Policy, opts ...Option) (*picker, func(...discovery.Endpoint)) {
	t.Helper()
	source := discoverytest.NewManual()
	set := discovery.NewSet(source)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = set.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	p, ok := New(set, policy, opts...).(*picker)
	require.True(t, ok)
	return p, func(eps ...discovery.Endpoint) {
		changed := set.Changed()
		source.Publish(eps...)
		<-changed
	}
}

func endpoints(prefix string, n int) []discovery.Endpoint {
	var eps []discovery.Endpoint
	for i := range 2 * n {
		e, err := discovery.New("http://"+prefix+strconv.Itoa(i)+":1",
			[]discovery.Role{discovery.RolePrefill, discovery.RoleDecode}[i%2])
		if err != nil {
			panic(err)
		}
		eps = append(eps, e)
	}
	return eps
}

// bound binds a picker to a connector whose decode engines may serve alone.
func bound(p *picker, c connector.KVConnector) *picker {
	return p.bind(newPairing(c, connector.Serving{}, p.opts))
}

// counted checks that loads are counted once in each list of each of a state's pickers, and nowhere else.
func counted(t require.TestingT, all ...*picker) {
	s := all[0].state
	if !s.policy.needs.loads {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	places := map[*slot]int{}
	for _, slots := range s.known.slots {
		for _, x := range slots {
			places[x] = 0
		}
	}
	for _, p := range all {
		for _, l := range p.latest.table.Load().lists {
			sum := int64(0)
			for _, x := range l.targets {
				sum += x.slot.load.Load()
				places[x.slot]++
			}
			require.Equal(t, sum, l.total.Load())
		}
	}
	for x, n := range places {
		x.mu.Lock()
		counts := len(x.cur)
		x.mu.Unlock()
		require.Equal(t, n, counts)
	}
}

// loads returns the load of all engines, in tokens.
func loads(p *picker) (sum int64) {
	for _, slots := range p.known.slots {
		for _, x := range slots {
			sum += x.load.Load()
		}
	}
	return sum
}

// collected collects garbage until what a test says of it holds.
func collected(t *testing.T, says func(c *assert.CollectT)) {
	t.Helper()
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		runtime.GC()
		says(c)
	}, 20*time.Second, time.Millisecond)
}

// A program makes new flows each time that its configuration changes, all with the same picker.
func TestAPickerThatNobodyHoldsLeavesNothingBehind(t *testing.T) {
	for _, policy := range []Policy{RoundRobin(), LeastLoad()} {
		t.Run(policy.String(), func(t *testing.T) {
			p, replace := pickerOf(t, policy)
			replace(endpoints("e", 3)...)
			kept := bound(p, named{"kept"})
			x, err := kept.Pick(t.Context(), &pdflow.PickInput{})
			require.NoError(t, err)
			x.Done(&pdflow.Outcome{})
			var gone []weak.Pointer[picker]
			var open []pdflow.Pick
			for range 100 {
				old := bound(p, named{"old"})
				x, err := old.Pick(t.Context(), &pdflow.PickInput{})
				require.NoError(t, err)
				gone, open = append(gone, weak.Make(old)), append(open, x)
			}
			collected(t, func(c *assert.CollectT) { // also while requests of theirs run
				for _, old := range gone {
					assert.Nil(c, old.Value())
				}
				counted(c, kept)
			})
			require.Equal(t, policy.needs.loads, loads(p) > 0)
			for _, x := range open {
				x.Done(&pdflow.Outcome{})
			}
			require.Zero(t, loads(p))
			runtime.KeepAlive(kept)
		})
	}
}

// A picker that has never been asked has no table, and leaves nothing behind.
func TestAPickerThatWasNeverAskedHasNoTable(t *testing.T) {
	p, replace := pickerOf(t, LeastLoad())
	replace(endpoints("e", 3)...)
	idle := weak.Make(bound(p, named{"idle"}))
	_, err := p.Pick(t.Context(), &pdflow.PickInput{})
	require.NoError(t, err)
	counted(t, p)
	collected(t, func(c *assert.CollectT) { assert.Nil(c, idle.Value()) })
	counted(t, p)
}

// Streams may still run on an engine that is listed, whatever its phase and however many ranks it has now.
func TestAnEngineKeepsItsLoadWhileItIsListed(t *testing.T) {
	p, replace := pickerOf(t, LeastLoad())
	eps := endpoints("e", 1)
	eps[1].Attributes = map[string]string{"dpSize": "3"}
	replace(eps...)
	var open []pdflow.Pick
	for range 3 {
		x, err := p.Pick(t.Context(), &pdflow.PickInput{})
		require.NoError(t, err)
		open = append(open, x)
	}
	one := p.known.slots["e1:1"][0]
	load := one.load.Load()
	require.Positive(t, load)
	for _, size := range []string{"2", "5", ""} {
		eps = slices.Clone(eps)
		eps[1].Attributes = map[string]string{"dpSize": size}
		replace(append(eps, endpoints("more"+size, 1)...)...)
		for range 4 {
			x, err := p.Pick(t.Context(), &pdflow.PickInput{})
			require.NoError(t, err)
			x.Done(&pdflow.Outcome{})
		}
		require.Same(t, one, p.known.slots["e1:1"][0])
		require.Equal(t, load, one.load.Load())
		require.Len(t, p.known.slots, 4, "who is gone leaves nothing behind")
		counted(t, p)
	}
	for _, x := range open {
		x.Done(&pdflow.Outcome{})
	}
	require.Zero(t, one.load.Load())
	counted(t, p)
}

func TestPickersAreSafeWhileEnginesAndFlowsComeAndGo(t *testing.T) {
	for _, name := range Policies() {
		t.Run(name, func(t *testing.T) {
			policy, err := ParsePolicy(name)
			require.NoError(t, err)
			p, replace := pickerOf(t, policy, ByModel())
			replace(endpoints("e", 4)...)
			tp := &ruled{named{"tp"}, []attr.PairRule{attr.Same("tpSize")}}
			kept := []*picker{bound(p, tp), bound(p, named{"nixl"}),
				p.bind(newPairing(tp, connector.Serving{PairOnly: true}, p.opts))}
			stop := make(chan struct{})
			var wg sync.WaitGroup
			for g := range 4 {
				wg.Go(func() {
					for i := g; ; i++ {
						select {
						case <-stop:
							return
						default:
						}
						flow := kept[i%3]
						if i%31 == 0 {
							flow = bound(p, named{"rare"}) // its flow ends with this pick
						}
						x, err := flow.Pick(t.Context(), &pdflow.PickInput{})
						if !assert.NoError(t, err) {
							return
						}
						if x.PrefillDone != nil && i%2 == 0 {
							x.PrefillDone(nil)
						}
						o := &pdflow.Outcome{}
						if i%17 == 0 {
							o.Err = &pdflow.Error{Code: pdflow.CodeDecodeFailed, Leg: pdflow.LegDecode,
								Endpoint: x.Decode.ID}
						}
						x.Done(o)
					}
				})
			}
			for i := range 12 {
				eps := endpoints("e", 2+i%4)
				for k := range eps {
					eps[k].Model = []string{"", "m"}[i%2]
					eps[k].Attributes = map[string]string{"dpSize": strconv.Itoa(1 + i%3)}
				}
				replace(eps...)
				replace(endpoints("e", 150+i)...)
			}
			close(stop)
			wg.Wait()
			for _, flow := range kept { // also tables that were made beside the picks
				flow.rebuild()
			}
			collected(t, func(c *assert.CollectT) { counted(c, kept...) })
			for _, slots := range p.known.slots {
				require.Zero(t, slots[0].load.Load())
			}
		})
	}
}

// The picker applies the rules once for each class of equal engines. The result must be the same as if it applied them
// to each pair of engines.
func TestTablesHoldExactlyThePairsThatCanMeet(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 9))
	of := func(values ...string) string { return values[r.IntN(len(values))] }
	roles := []discovery.Role{discovery.RolePrefill, discovery.RoleDecode, discovery.RoleBoth}
	conns := []connector.KVConnector{nil, named{"http"}, named{"nixl"},
		&ruled{named{"lmcache"}, []attr.PairRule{attr.Multiple("tpSize")}}}
	for round := range 60 {
		var eps []discovery.Endpoint
		for i := range 1 + r.IntN(24) {
			e, err := discovery.New(fmt.Sprintf("http://e%d:1", i), roles[r.IntN(3)])
			require.NoError(t, err)
			e.Group, e.Model, e.Version = of("", "", "g"), of("", "m", "n"), of("", "1", "2")
			e.Attributes = map[string]string{"connector": of("", "nixl", "lmcache", "nixl,lmcache"),
				"kvNetwork": of("", "a", "b", "a,b"), "tpSize": of("", "1", "2", "3")}
			eps = append(eps, e)
		}
		for _, policy := range []Policy{RoundRobin(), PrefixAffinity()} {
			p, replace := pickerOf(t, policy, WithRules(attr.Same("version")),
				[]Option{ByModel(), WithAnyVersion()}[round%2])
			replace(eps...)
			for _, c := range conns {
				flow := bound(p, c)
				got := map[[2]string]bool{}
				for _, x := range flow.load().all.pairs.targets {
					for _, y := range x.peers.targets {
						pre, dec := x, y
						if x.leg == decodeLeg {
							pre, dec = y, x
						}
						got[[2]string{pre.endpoint.ID, dec.endpoint.ID}] = true
					}
				}
				want := map[[2]string]bool{}
				for i := range eps {
					for k := range eps {
						pre, dec := &eps[i], &eps[k]
						if pre.Role.Has(discovery.RolePrefill) && dec.Role.Has(discovery.RoleDecode) &&
							pre.Group == dec.Group && flow.pairing.gap(pre, dec) == gapNone {
							want[[2]string{pre.ID, dec.ID}] = true
						}
					}
				}
				require.Equal(t, want, got, "round %d", round)
			}
		}
	}
}

// A class of its own for each engine (a network that none shares beside the one that all do) must not cost a list for
// each.
func TestClassesThatCanMeetTheSameEnginesShareAList(t *testing.T) {
	p, replace := pickerOf(t, LeastLoad())
	eps := endpoints("e", 40)
	for i := range eps {
		eps[i].Attributes = map[string]string{"kvNetwork": "all,rail" + strconv.Itoa(i)}
	}
	replace(eps...)
	_, err := p.Pick(t.Context(), &pdflow.PickInput{})
	require.NoError(t, err)
	require.Len(t, p.latest.table.Load().lists, 3,
		"those of decode engines, of engines of role both, and one of peers")
}
