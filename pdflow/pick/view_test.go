// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"

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
	rules []connector.PairRule
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

// counted checks that loads are counted once in each list of each view, and nowhere else.
func counted(t *testing.T, p *picker) {
	t.Helper()
	if !p.policy.needs.loads {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	places := map[*slot]int{}
	for _, slots := range p.known.slots {
		for _, s := range slots {
			places[s] = 0
		}
	}
	for _, v := range p.views.Load().list {
		for _, l := range v.table.Load().lists {
			sum := int64(0)
			for _, x := range l.targets {
				sum += x.slot.load.Load()
				places[x.slot]++
			}
			require.Equal(t, sum, l.total.Load())
		}
	}
	for s, n := range places {
		require.Len(t, s.cur, n)
	}
}

func TestAPickerKeepsTheViewsThatAreUsed(t *testing.T) {
	p, replace := pickerOf(t, LeastLoad())
	replace(endpoints("e", 3)...)
	always := &pdflow.PickInput{Connector: named{"always"}}
	var kept *view
	for i := range 5 * viewsMost {
		_, err := p.Pick(t.Context(), always)
		require.NoError(t, err)
		x, err := p.Pick(t.Context(), &pdflow.PickInput{Connector: named{"c" + strconv.Itoa(i)}, Both: i%2 == 0})
		require.NoError(t, err)
		x.Done(&pdflow.Outcome{})
		if kept == nil {
			kept = p.view(always)
		}
		require.Same(t, kept, p.view(always), "one that is in use has gone")
		require.LessOrEqual(t, len(p.views.Load().list), viewsMost)
		counted(t, p)
	}
	require.Len(t, p.views.Load().list, viewsMost)
	for i := range idleMost + 2 {
		replace(endpoints("e", 2+i%2)...)
		_, err := p.Pick(t.Context(), always)
		require.NoError(t, err)
	}
	require.Equal(t, []*view{kept}, p.views.Load().list, "what no flow has used for long leaves nothing behind")
	counted(t, p)
}

// A pick works even if its view is evicted after the pick has found it.
func TestAViewThatHadToGoIsMadeAgain(t *testing.T) {
	p, replace := pickerOf(t, LeastLoad())
	replace(endpoints("e", 3)...)
	v := p.view(&pdflow.PickInput{Connector: named{"nixl"}})
	p.mu.Lock()
	p.drop(v)
	p.mu.Unlock()
	replace(endpoints("other", 3)...)
	require.Equal(t, "other1:1", p.load(v).all.pairs.targets[0].endpoint.ID)
	require.Len(t, p.views.Load().list, 1)
	require.NotSame(t, v, p.views.Load().list[0])
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

func TestViewsAreSafeWhileEnginesAndConnectorsComeAndGo(t *testing.T) {
	for _, policy := range []Policy{RoundRobin(), LeastLoad(), PrefixAffinity(), Sticky()} {
		t.Run(policy.String(), func(t *testing.T) {
			p, replace := pickerOf(t, policy, ByModel())
			replace(endpoints("e", 4)...)
			tp := &ruled{named{"tp"}, []connector.PairRule{attr.Same("tpSize")}}
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
						in := &pdflow.PickInput{Connector: tp, Both: i%5 == 0}
						switch i % 3 {
						case 1:
							in.Connector = named{"nixl"}
						case 2:
							in.Connector = named{"rare" + strconv.Itoa(i%31)}
						}
						x, err := p.Pick(t.Context(), in)
						if !assert.NoError(t, err) {
							return
						}
						if x.PrefillDone != nil && i%2 == 0 {
							x.PrefillDone(nil)
						}
						x.Done(&pdflow.Outcome{})
					}
				})
			}
			for i := range 12 {
				eps := endpoints("e", 2+i%4)
				for k := range eps {
					eps[k].Model = []string{"", "m"}[i%2]
				}
				replace(eps...)
				replace(endpoints("e", 150+i)...)
			}
			close(stop)
			wg.Wait()
			for _, v := range p.views.Load().list { // those that were taken over beside the picks too
				p.rebuild(v)
			}
			counted(t, p)
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
		&ruled{named{"lmcache"}, []connector.PairRule{attr.Multiple("tpSize")}}}
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
				v := p.view(&pdflow.PickInput{Connector: c})
				got := map[[2]string]bool{}
				for _, x := range v.table.Load().all.pairs.targets {
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
							pre.Group == dec.Group && v.pairing.gap(pre, dec) == gapNone {
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
	require.Len(t, p.views.Load().list[0].table.Load().lists, 3,
		"those of decode engines, of engines of role both, and one of peers")
}
