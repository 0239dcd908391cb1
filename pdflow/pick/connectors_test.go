// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	_ "github.com/pdkit/pdkit/connector/lmcache" // for their class names
	_ "github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// mute has the methods of a connector that a picker does not call.
type mute struct{}

func (mute) Prefill(context.Context, *connector.Session, *connector.Leg) error { return nil }
func (mute) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

// protocol is a connector with rules.
type protocol struct {
	mute
	name  string
	rules []attr.PairRule
	asked atomic.Int32
}

func (c *protocol) Traits() connector.Traits {
	c.asked.Add(1)
	return connector.Traits{Name: c.name, PairRules: c.rules}
}

func sameTP() *protocol {
	return &protocol{name: "same-tp", rules: []attr.PairRule{attr.Same("tpSize")}}
}

// plain has no rules.
type plain struct {
	mute
	name string
}

func (c plain) Traits() connector.Traits { return connector.Traits{Name: c.name} }

type wrapper struct{ connector.KVConnector }

func (w wrapper) Unwrap() connector.KVConnector { return w.KVConnector }

// byValue is a connector that Go cannot compare.
type byValue struct {
	plain
	rules []attr.PairRule
}

func (c byValue) Traits() connector.Traits { return connector.Traits{Name: c.name, PairRules: c.rules} }

// Which engines may serve alone: all that decode, or only those of role both.
var (
	anyAlone = connector.Serving{}
	pairOnly = connector.Serving{PairOnly: true}
)

// bind binds a picker to a connector whose decode engines may serve alone.
func bind(p pdflow.Picker, c connector.KVConnector) pdflow.Picker { return p.Bind(c, anyAlone) }

// pairs returns which pairs some picks make.
func pairs(t *testing.T, p pdflow.Picker) map[string]bool {
	t.Helper()
	seen := map[string]bool{}
	for i := range 60 {
		seen[pair(t, p, input(t, i))] = true
	}
	return seen
}

// only says which pairs a policy may make. One that chooses by chance makes them all.
func only(t *testing.T, policy pick.Policy, seen map[string]bool, want ...string) {
	t.Helper()
	for x := range seen {
		require.Contains(t, want, x)
	}
	if policy.String() == "random" {
		require.Len(t, seen, len(want))
	}
}

func TestTheConnectorsRulesHoldForItsOwnPicks(t *testing.T) {
	engines := []discovery.Endpoint{ep("p2", prefill, "tpSize=2"), ep("p8", prefill, "tpSize=8"),
		ep("d8", decode, "tpSize=8")}
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		engines := slices.Clone(engines)
		f := newFleet(t, engines...)
		p := pick.New(f.Set, policy, pick.WithSeed(1))
		rules := sameTP()
		strict, loose, wrapped := bind(p, rules), bind(p, &plain{name: "loose"}), bind(p, wrapper{rules})
		for range 3 { // round robin
			only(t, policy, pairs(t, p), "p2+d8", "p8+d8")
			only(t, policy, pairs(t, bind(strict, nil)), "p2+d8", "p8+d8")
			only(t, policy, pairs(t, strict), "p8+d8")
			only(t, policy, pairs(t, loose), "p2+d8", "p8+d8")
			only(t, policy, pairs(t, wrapped), "p8+d8")
			engines = append(engines, ep("d"+strconv.Itoa(len(engines)), decode, "tpSize=1", "group=b"))
			f.replace(engines...)
		}
		require.EqualValues(t, 2, rules.asked.Load(), "they are asked for once, and once for the wrapper")

		p = pick.New(f.Set, policy, pick.WithRules(attr.Same("blockSize")))
		f.replace(ep("p2", prefill, "tpSize=2"), ep("p8", prefill, "tpSize=8"),
			ep("other", prefill, "tpSize=8", "blockSize=1"), ep("d8", decode, "tpSize=8", "blockSize=2"))
		only(t, policy, pairs(t, bind(p, rules)), "p8+d8") // beside those of WithRules
	})
}

func TestConnectorsThatCannotBeComparedHaveTheirOwnRules(t *testing.T) {
	engines := []discovery.Endpoint{ep("p2", prefill, "tpSize=2"), ep("p8", prefill, "tpSize=8"),
		ep("d8", decode, "tpSize=8")}
	p := pick.New(newFleet(t, engines...).Set, pick.RoundRobin())
	rules := []attr.PairRule{attr.Same("tpSize")}
	for range 2 {
		require.Len(t, pairs(t, bind(p, byValue{plain{name: "strict"}, rules})), 1)
		require.Len(t, pairs(t, bind(p, wrapper{byValue{plain{name: "strict"}, rules}})), 1, "nor can what holds one")
		require.Len(t, pairs(t, bind(p, byValue{plain{name: "loose"}, nil})), 2)
		require.Len(t, pairs(t, bind(p, byValue{plain{name: "strict"}, nil})), 2, "the name is not what counts")
		require.Len(t, pairs(t, bind(p, plain{name: "strict"})), 2)
	}
}

// However many connectors share a picker, each gets what it can have.
func TestManyConnectorsShareAPicker(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		p := pick.New(newFleet(t, many(1, 2, "tpSize=2")...).Set, policy)
		for i := range 200 {
			c := &protocol{name: "c" + strconv.Itoa(i%40),
				rules: []attr.PairRule{{Attribute: "tpSize", Compatible: func(_, _ string) bool {
					return i%2 == 0
				}}}}
			x, err := bind(p, c).Pick(context.Background(), input(t, i))
			if i%2 == 1 {
				require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
				continue
			}
			require.NoError(t, err)
			x.Done(&pdflow.Outcome{})
		}
	})
}

// The load that one connector's requests put on an engine counts in the picks for all other connectors, too.
func TestLoadIsTheEnginesWhicheverConnectorBringsIt(t *testing.T) {
	for _, policy := range []pick.Policy{pick.LeastLoad(), pick.TwoChoices(), pick.SessionAffinity(""),
		pick.ZoneFirst(""), pick.Sticky(), pick.PrefixAffinity()} {
		t.Run(policy.String(), func(t *testing.T) {
			f := newFleet(t, append(many(2, 2), ep("x", both, "group=b"), ep("y", both, "group=b"))...)
			p := pick.New(f.Set, policy, pick.WithBound(1, 0))
			conn := &plain{name: "nixl"}
			nixl, apart, fallback := bind(p, conn), p.Bind(conn, pairOnly), bind(p, &plain{name: "lmcache"})
			for _, flow := range []pdflow.Picker{nixl, fallback, apart, p} {
				mustPick(t, flow, &pdflow.PickInput{}).Done(&pdflow.Outcome{}) // all tables are there
			}
			long := mustPick(t, apart,
				&pdflow.PickInput{Request: request(t, strings.Repeat("long ", 4000), 30_000)})
			for i := range 30 {
				for _, flow := range []pdflow.Picker{fallback, nixl, p} {
					x := mustPick(t, flow, input(t, i))
					require.NotEqual(t, long.Decode.ID, x.Decode.ID)
					require.NotEqual(t, long.Prefill.ID, x.Prefill.ID)
					x.Done(&pdflow.Outcome{})
				}
			}
			f.replace(append(many(2, 2), ep("x", both, "group=b"), ep("y", both, "group=b"), ep("p9", prefill))...)
			for i := range 30 {
				x := mustPick(t, fallback, input(t, i))
				require.NotEqual(t, long.Decode.ID, x.Decode.ID, "after a snapshot too")
				x.Done(&pdflow.Outcome{})
			}
		})
	}
}

// What one flow learns of an engine's faults holds for the others, and for those that are made later.
func TestCooldownsAreTheEnginesWhicheverConnectorBringsThem(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		p := pick.New(newFleet(t, many(2, 2)...).Set, policy)
		nixl, fallback := bind(p, &plain{name: "nixl"}), p.Bind(&plain{name: "lmcache"}, pairOnly)
		mustPick(t, nixl, input(t, 0)).Done(failed(pdflow.LegPrefill, "p0"))
		mustPick(t, fallback, input(t, 0)).Done(failed(pdflow.LegDecode, "d1"))
		all := []pdflow.Picker{p, nixl, fallback, bind(nixl, sameTP())}
		for i := range 8 { // well within the second that a cooldown lasts
			for _, flow := range all {
				require.Equal(t, "p1+d0", pair(t, flow, input(t, i)))
			}
		}
		for _, flow := range all {
			require.Len(t, pick.Cooldowns(flow), 2, "an operator may ask each of them")
		}
	})
}

func TestWhatIsRememberedOfEnginesIsOfAllConnectors(t *testing.T) {
	flows := func(set *discovery.Set, policy pick.Policy) (a, b pdflow.Picker) {
		p := pick.New(set, policy)
		return bind(p, &plain{name: "a"}), bind(p, &plain{name: "b"})
	}
	a, b := flows(newFleet(t, many(8, 1)...).Set, pick.PrefixAffinity())
	prompt := request(t, strings.Repeat("a prompt that both send ", 100), 1)
	home := mustPick(t, a, &pdflow.PickInput{Request: prompt})
	home.Done(&pdflow.Outcome{})
	for range 20 {
		x := mustPick(t, b, &pdflow.PickInput{Request: prompt})
		x.Done(&pdflow.Outcome{})
		require.Equal(t, home.Prefill.ID, x.Prefill.ID)
	}

	a, b = flows(newFleet(t, many(40, 1)...).Set, pick.Sticky())
	met := map[string]bool{}
	for i := range 100 {
		x := mustPick(t, []pdflow.Picker{a, b}[i%2], &pdflow.PickInput{})
		x.Done(&pdflow.Outcome{})
		met[x.Prefill.ID] = true
	}
	require.LessOrEqual(t, len(met), 4)

	a, b = flows(newFleet(t, many(9, 9)...).Set, pick.SessionAffinity(""))
	for i := range 50 {
		in := &pdflow.PickInput{Header: http.Header{"X-Session-Id": {strconv.Itoa(i)}}}
		first := mustPick(t, a, in)
		first.Done(&pdflow.Outcome{}) // while it runs, the bound of loads may move the next one
		next := mustPick(t, b, in)
		next.Done(&pdflow.Outcome{})
		require.Equal(t, [2]string{first.Prefill.ID, first.Decode.ID}, [2]string{next.Prefill.ID, next.Decode.ID})
	}

	a, b = flows(newFleet(t, many(1, 4)...).Set, pick.LeastLoad())
	served := map[string]int{}
	for i := range 40 { // of engines that are idle, the one that has served least
		x := mustPick(t, []pdflow.Picker{a, b}[i%2], &pdflow.PickInput{})
		x.Done(&pdflow.Outcome{})
		served[x.Decode.ID]++
	}
	require.Equal(t, map[string]int{"d0": 10, "d1": 10, "d2": 10, "d3": 10}, served)
}

// A rollout, or two fleets in one set: engines tell by an attribute which connectors they run.
func TestEnginesMeetForTheConnectorsThatTheyRun(t *testing.T) {
	engines := []discovery.Endpoint{
		ep("pn", prefill, "connector=nixl"), ep("dn", decode, "connector=NixlConnector"),
		ep("pl", prefill, "connector=lmcache"), ep("dl", decode, "connector=LMCacheConnectorV1"),
		ep("pb", prefill, "connector=lmcache , nixl"), ep("other", prefill, "connector=Nixl"),
	}
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		p := pick.New(newFleet(t, engines...).Set, policy, pick.WithBound(1, 0), pick.WithSeed(1))
		only(t, policy, pairs(t, bind(p, &plain{name: "nixl"})), "pn+dn", "pb+dn")
		only(t, policy, pairs(t, bind(p, &plain{name: "lmcache"})), "pl+dl", "pb+dl")
		// Who names no connector gets engines that have one in common, and what transfers nothing goes with any.
		only(t, policy, pairs(t, p), "pn+dn", "pb+dn", "pl+dl", "pb+dl")
		only(t, policy, pairs(t, bind(p, &plain{name: "http"})), "pn+dn", "pb+dn", "pl+dl", "pb+dl", "pn+dl", "pl+dn",
			"other+dn", "other+dl")
		_, err := bind(p, &plain{name: "mooncake"}).Pick(context.Background(), &pdflow.PickInput{})
		require.ErrorIs(t, err, pdflow.CodeNoEndpoint)

		p = pick.New(newFleet(t, append(engines, many(1, 1)...)...).Set, policy, pick.WithSeed(1))
		only(t, policy, pairs(t, bind(p, &plain{name: "mooncake"})), "p0+d0") // who does not tell runs any
		only(t, policy, pairs(t, bind(p, &plain{name: "nixl"})), "pn+dn", "pb+dn", "p0+dn", "pn+d0", "pb+d0", "p0+d0")
	})
}

func TestEnginesThatServeAloneDoSoForAnyConnector(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		engines := []discovery.Endpoint{ep("pn", prefill, "connector=nixl"), ep("dn", decode, "connector=nixl"),
			ep("dl", decode, "connector=lmcache"), ep("x", both, "connector=lmcache")}
		p := pick.New(newFleet(t, engines...).Set, policy, pick.WithBound(1, 0))
		seen, nixl := map[string]bool{}, &plain{name: "nixl"}
		alone, apart := bind(p, nixl), p.Bind(nixl, pairOnly)
		for i := range 100 {
			in := input(t, i)
			in.Single = true
			seen[pair(t, alone, in)] = true
		}
		for i := range 20 {
			in := input(t, i)
			require.Equal(t, "pn+dn", pair(t, apart, in))
			in.Single = true
			require.Equal(t, "+x", pair(t, apart, in))
		}
		require.Equal(t, map[string]bool{"+dn": true, "+dl": true, "+x": true}, seen)
	})
}
