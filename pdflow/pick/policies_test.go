// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// fleet is a set whose list a test replaces.
type fleet struct {
	*discovery.Set
	source *discoverytest.Manual
}

func newFleet(t testing.TB, eps ...discovery.Endpoint) *fleet {
	t.Helper()
	f := &fleet{source: discoverytest.NewManual()}
	f.Set = discovery.NewSet(f.source)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = f.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	f.replace(eps...)
	return f
}

// replace returns when the list is the set's.
func (f *fleet) replace(eps ...discovery.Endpoint) {
	changed := f.Changed()
	f.source.Publish(eps...)
	<-changed
}

// ep makes an endpoint; mods are group=, model=, version=, zone= or an attribute.
func ep(id string, role discovery.Role, mods ...string) discovery.Endpoint {
	e, err := discovery.New("http://"+id+":1", role)
	if err != nil {
		panic(err)
	}
	e.ID = id
	for _, m := range mods {
		name, value, _ := strings.Cut(m, "=")
		switch name {
		case "group":
			e.Group = value
		case "model":
			e.Model = value
		case "version":
			e.Version = value
		case "zone":
			e.Zone = value
		default:
			if e.Attributes == nil {
				e.Attributes = map[string]string{}
			}
			e.Attributes[name] = value
		}
	}
	return e
}

// many makes p prefill and d decode engines.
func many(p, d int, mods ...string) []discovery.Endpoint {
	eps := make([]discovery.Endpoint, 0, p+d)
	for i := range p {
		eps = append(eps, ep("p"+strconv.Itoa(i), prefill, mods...))
	}
	for i := range d {
		eps = append(eps, ep("d"+strconv.Itoa(i), decode, mods...))
	}
	return eps
}

func request(t testing.TB, prompt string, limit int) *connector.ClientRequest {
	t.Helper()
	r, err := connector.ParseRequest(connector.APICompletions,
		fmt.Appendf(nil, `{"model":"m","prompt":%q,"max_tokens":%d}`, prompt, limit))
	require.NoError(t, err)
	return r
}

func mustPick(t testing.TB, p pdflow.Picker, in *pdflow.PickInput) pdflow.Pick {
	t.Helper()
	x, err := p.Pick(context.Background(), in)
	require.NoError(t, err)
	return x
}

// eachPolicy runs a rule that all policies keep.
func eachPolicy(t *testing.T, rule func(t *testing.T, policy pick.Policy)) {
	for _, name := range pick.Policies() {
		t.Run(name, func(t *testing.T) {
			policy, err := pick.ParsePolicy(name)
			require.NoError(t, err)
			require.Equal(t, name, policy.String())
			rule(t, policy)
		})
	}
	t.Run("score", func(t *testing.T) { rule(t, pick.Score(nil)) })
}

// inputs differ in what policies look at.
func input(t testing.TB, i int) *pdflow.PickInput {
	return &pdflow.PickInput{Request: request(t, strings.Repeat("prompt "+strconv.Itoa(i%7)+" ", 200), 10+i%90),
		Header: http.Header{"X-Session-Id": {strconv.Itoa(i % 11)}}}
}

func TestEachPolicyServesAllTopologiesAndUsesEveryEngine(t *testing.T) {
	for _, size := range [][2]int{{1, 1}, {1, 4}, {4, 1}, {3, 2}, {2, 5}, {4, 4}, {1, 30}, {30, 1}, {13, 5}} {
		eachPolicy(t, func(t *testing.T, policy pick.Policy) {
			p := pick.New(newFleet(t, many(size[0], size[1])...).Set, policy, pick.WithSeed(1), pick.WithBound(1, 0))
			seen := map[string]bool{}
			for i := range 400 { // nobody is done: load drives even the sticky ones on
				x := mustPick(t, p, input(t, i))
				require.Equal(t, prefill, x.Prefill.Role)
				require.Equal(t, decode, x.Decode.Role)
				seen[x.Prefill.ID], seen[x.Decode.ID] = true, true
			}
			require.Len(t, seen, size[0]+size[1])
		})
	}
}

// flowsOf binds a picker for flows of three connectors: once where all decode engines may serve alone, and once where
// only those of role both do.
func flowsOf(p pdflow.Picker) (flows, apart []pdflow.Picker) {
	for _, c := range []connector.KVConnector{nil, &plain{name: "a"}, sameTP()} {
		flows, apart = append(flows, bind(p, c)), append(apart, p.Bind(c, pairOnly))
	}
	return flows, apart
}

func TestEachPolicyIsDeterminedByItsSeed(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		run := func(seed uint64) (all []string) {
			p := pick.New(newFleet(t, many(9, 7)...).Set, policy, pick.WithSeed(seed))
			var open []func(*pdflow.Outcome)
			flows, apart := flowsOf(p)
			for i := range 300 {
				flow := flows[i%3]
				if i%5 == 0 {
					flow = apart[i%3]
				}
				x := mustPick(t, flow, input(t, i))
				all = append(all, x.Prefill.ID+x.Decode.ID)
				if open = append(open, x.Done); len(open) > 20 {
					open[0](&pdflow.Outcome{})
					open = open[1:]
				}
			}
			return all
		}
		require.Equal(t, run(1), run(1))
		if n := policy.String(); n != "round-robin" && n != "least-load" {
			require.NotEqual(t, run(1), run(2), "the seed has no part in it")
		}
	})
}

func TestEachPolicyAvoidsWhatFailedWhileOthersAreThere(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		p := pick.New(newFleet(t, many(3, 3)...).Set, policy)
		for i := range 60 {
			in := input(t, i)
			in.Avoid = []string{"p0", "p1", "d0", "d2"}
			require.Equal(t, "p2+d1", pair(t, p, in))
			in.Avoid = []string{"p0", "p1", "p2", "d0", "d2"} // where P and D failed together, and there is no other P
			require.Equal(t, "d1", mustPick(t, p, in).Decode.ID)
			in.Avoid = []string{"p0", "p1", "d0", "d1", "d2"}
			require.Equal(t, "p2", mustPick(t, p, in).Prefill.ID)
			in.Avoid = []string{"p0", "p1", "p2", "d0", "d1", "d2"}
			require.NotEmpty(t, pair(t, p, in), "the last engines are used all the same")
		}
	})
}

// Full engines are taken after those with room, and before those that have failed.
func TestEachPolicyPrefersFullEnginesToOnesInACooldown(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		p := pick.New(newFleet(t, many(3, 1)...).Set, policy)
		mustPick(t, p, input(t, 0)).Done(failed(pdflow.LegPrefill, "p0"))
		for i := range 40 {
			in := input(t, i)
			in.Avoid, in.Full = []string{"p1"}, []string{"p1"}
			require.Equal(t, "p2+d0", pair(t, p, in))
			in.Avoid = []string{"p2", "p1"} // the request has failed at p2
			require.Equal(t, "p1+d0", pair(t, p, in))
			in.Avoid, in.Full = []string{"p2", "p1", "d0"}, []string{"p1", "d0"}
			require.Equal(t, "p1+d0", pair(t, p, in))
		}
	})
}

func TestEachPolicyLetsEnginesAndPairsRest(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		p := pick.New(newFleet(t, many(2, 2)...).Set, policy)
		fail := func(o *pdflow.Outcome) { mustPick(t, p, input(t, 0)).Done(o) }
		fail(failed(pdflow.LegPrefill, "p0"))
		fail(failed(pdflow.LegDecode, "d1"))
		for i := range 40 {
			require.Equal(t, "p1+d0", pair(t, p, input(t, i)))
		}
		fail(failed(pdflow.LegPrefill, "p1"))
		fail(failed(pdflow.LegDecode, "d0"))
		for i := range 40 {
			require.NotEmpty(t, pair(t, p, input(t, i)), "a cooldown took the last engine of a role")
		}
	})
	eachPolicy(t, func(t *testing.T, policy pick.Policy) { // two pairs rest, and the request has failed at one of them
		p := pick.New(newFleet(t, many(1, 3)...).Set, policy)
		for _, d := range []string{"d0", "d1"} {
			s := contract.NewSession(request(t, "x", 1), "", ep("p0", prefill), ep(d, decode))
			mustPick(t, p, input(t, 0)).Done(&pdflow.Outcome{Session: s, Orphan: true,
				Err: &pdflow.Error{Code: pdflow.CodeClientGone}})
		}
		for i := range 40 {
			in := input(t, i)
			in.Avoid = []string{"d0", "p0"}
			require.Equal(t, "p0+d2", pair(t, p, in))
		}
	})
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		p := pick.New(newFleet(t, many(2, 1)...).Set, policy)
		s := contract.NewSession(request(t, "x", 1), "", ep("p0", prefill), ep("d0", decode))
		mustPick(
			t, p, input(t, 0),
		).Done(&pdflow.Outcome{Session: s, Orphan: true, Err: &pdflow.Error{Code: pdflow.CodeClientGone}})
		for i := range 40 {
			require.Equal(t, "p1+d0", pair(t, p, input(t, i)))
		}
	})
}

func TestEachPolicyPicksOneEngineForAWholeRequest(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		p := pick.New(
			newFleet(t, ep("p", prefill, "group=a"), ep("d", decode, "group=b"), ep("x", both, "group=c")).Set, policy,
			pick.WithBound(1, 0),
		)
		seen, apart := map[string]bool{}, p.Bind(nil, pairOnly)
		for i := range 100 {
			in := input(t, i)
			in.Single = true
			seen[pair(t, p, in)] = true
			x := mustPick(t, apart, in)
			require.Equal(t, "x", x.Decode.ID)
			x.Done(&pdflow.Outcome{})
		}
		require.Equal(t, map[string]bool{"+d": true, "+x": true}, seen)
	})
}

func TestEachPolicyNeverPairsAnEngineWithItself(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		p := pick.New(newFleet(t, ep("x", both, "dpSize=9", "dpSizeLocal=3"), ep("y", both)).Set, policy)
		for i := range 100 {
			require.Contains(t, []string{"x+y", "y+x"}, pair(t, p, input(t, i)))
		}
		p = pick.New(newFleet(t, ep("x", both, "dpSize=3")).Set, policy)
		require.Equal(t, "+x", pair(t, p, input(t, 0)), "alone it serves the whole request")
		p = pick.New(newFleet(t, ep("x", both, "group=a"), ep("p", prefill), ep("d", decode)).Set, policy)
		for i := range 50 {
			require.Equal(t, "p+d", pair(t, p, input(t, i)), "an engine of role both serves alone only if it must")
		}
	})
}

func TestEachPolicyNamesEncodeEngines(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		eps := append(many(1, 1), ep("e0", discovery.RoleEncode), ep("e1", discovery.RoleEncode),
			ep("e2", discovery.RoleEncode))
		p := pick.New(newFleet(t, eps...).Set, policy)
		in := input(t, 0)
		in.Encode = 2
		seen := map[string]bool{}
		for range 20 {
			x := mustPick(t, p, in)
			require.Len(t, x.Encode, 2)
			require.NotEqual(t, x.Encode[0].ID, x.Encode[1].ID)
			seen[x.Encode[0].ID] = true
		}
		require.Len(t, seen, 3)
		in.Avoid = []string{"e0", "e1"}
		for range 20 {
			x := mustPick(t, p, in)
			require.Len(t, x.Encode, 1)
			require.Equal(t, "e2", x.Encode[0].ID)
		}
		in.Avoid = []string{"e0", "e1", "e2"}
		require.Len(t, mustPick(t, p, in).Encode, 2)
	})
}

func TestEachPolicyNamesARankOnEachLeg(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		p := pick.New(newFleet(t, ep("p", prefill, "dpSize=4"), ep("d", decode, "dpSize=2")).Set, policy,
			pick.WithBound(1, 0))
		pr, dr := map[int]bool{}, map[int]bool{}
		for i := range 200 {
			x := mustPick(t, p, input(t, i))
			n, ok := x.PrefillRank.Get()
			require.True(t, ok)
			pr[n] = true
			n, ok = x.DecodeRank.Get()
			require.True(t, ok)
			dr[n] = true
		}
		require.Equal(t, map[int]bool{0: true, 1: true, 2: true, 3: true}, pr)
		require.Equal(t, map[int]bool{0: true, 1: true}, dr)
		p = pick.New(newFleet(t, ep("p", prefill, "dpSize=65000"), ep("d", decode)).Set, policy)
		x := mustPick(t, p, input(t, 0))
		_, chosen := x.PrefillRank.Get()
		require.False(t, chosen, "so many ranks would cost memory: the session chooses")
		_, chosen = x.DecodeRank.Get()
		require.False(t, chosen)
	})
}

func TestEachPolicySeesANewSnapshotAtOnce(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		f := newFleet(t, many(2, 2)...)
		p := pick.New(f.Set, policy)
		for i := range 20 {
			require.NotEmpty(t, pair(t, p, input(t, i)))
		}
		f.replace(ep("p9", prefill), ep("d9", decode))
		for i := range 20 {
			require.Equal(t, "p9+d9", pair(t, p, input(t, i)))
		}
	})
}

func TestALargeSnapshotIsTakenOverBesideThePicks(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		f := newFleet(t, many(400, 0)...)
		p := pick.New(f.Set, policy)
		_, err := p.Pick(context.Background(), input(t, 0))
		require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
		f.replace(many(400, 400)...)
		require.NotEmpty(t, pair(t, p, input(t, 0)), "a pick that finds nobody waits for the new snapshot")
		f.replace(append(many(300, 0), ep("d-new", decode))...)
		require.Eventually(t, func() bool { return strings.HasSuffix(pair(t, p, input(t, 1)), "+d-new") },
			20*time.Second, time.Millisecond)
	})
}
