// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type engine struct {
	id, group string
	role      discovery.Role
}

func set(t testing.TB, engines ...engine) *discovery.Set {
	t.Helper()
	eps := make([]discovery.Endpoint, 0, len(engines))
	for _, e := range engines {
		ep, err := discovery.New("http://"+e.id+":1", e.role)
		require.NoError(t, err)
		ep.ID, ep.Group = e.id, e.group
		eps = append(eps, ep)
	}
	src, err := static.New(eps...)
	require.NoError(t, err)
	s := discovery.NewSet(src)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	require.NoError(t, s.WaitReady(ctx, func(s *discovery.Snapshot) bool { return len(s.Endpoints) == len(eps) }))
	return s
}

const (
	prefill = discovery.RolePrefill
	decode  = discovery.RoleDecode
	both    = discovery.RoleBoth
)

func pair(t *testing.T, p pdflow.Picker, in *pdflow.PickInput) string {
	t.Helper()
	x, err := p.Pick(context.Background(), in)
	require.NoError(t, err)
	return x.Prefill.ID + "+" + x.Decode.ID
}

func TestRoundRobinUsesEveryEngineAlike(t *testing.T) {
	p := pick.New(
		set(t, engine{"p1", "", prefill}, engine{"p2", "", prefill}, engine{"d1", "", decode}, engine{"d2", "", decode},
			engine{"d3", "", decode}), pick.RoundRobin(),
	)
	seen := map[string]int{}
	for range 600 {
		x, err := p.Pick(context.Background(), &pdflow.PickInput{})
		require.NoError(t, err)
		seen[x.Prefill.ID]++
		seen[x.Decode.ID]++
	}
	require.Equal(t, map[string]int{"p1": 300, "p2": 300, "d1": 200, "d2": 200, "d3": 200}, seen)
}

// Round robin goes on at the same position with a new snapshot. Otherwise frequent snapshots would send everything to
// the first engines of the list.
func TestRoundRobinGoesOnOverSnapshots(t *testing.T) {
	f := newFleet(t, many(2, 4)...)
	p := pick.New(f.Set, pick.RoundRobin())
	seen := map[string]int{}
	for i := range 40 {
		x := mustPick(t, p, &pdflow.PickInput{})
		seen[x.Prefill.ID]++
		seen[x.Decode.ID]++
		f.replace(append(many(2, 4), ep("other"+strconv.Itoa(i), prefill, "group=other"))...)
	}
	require.Equal(t, map[string]int{"p0": 20, "p1": 20, "d0": 10, "d1": 10, "d2": 10, "d3": 10}, seen)
}

func TestPairsMeetWithinOneGroup(t *testing.T) {
	p := pick.New(
		set(t, engine{"pa", "a", prefill}, engine{"da", "a", decode}, engine{"pb", "b", prefill},
			engine{"db", "b", decode}, engine{"dc", "c", decode}), pick.RoundRobin(),
	)
	for range 20 {
		require.Contains(t, []string{"pa+da", "pb+db"}, pair(t, p, &pdflow.PickInput{}))
	}
}

func TestTheMissingRoleIsNamed(t *testing.T) {
	for message, engines := range map[string][]engine{
		"no engine is ready":                                   nil,
		"no prefill engine is ready":                           {{"d", "", decode}},
		"no decode engine is ready":                            {{"p", "", prefill}},
		"no prefill and decode engines of one group are ready": {{"p", "a", prefill}, {"d", "b", decode}},
	} {
		_, err := pick.New(set(t, engines...), pick.RoundRobin()).Pick(context.Background(), &pdflow.PickInput{})
		require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
		require.ErrorContains(t, err, message)
	}
}

func TestOneEngineForAWholeRequest(t *testing.T) {
	p := pick.New(set(t, engine{"p", "a", prefill}, engine{"d", "b", decode}, engine{"x", "c", both}),
		pick.RoundRobin())
	seen := map[string]bool{}
	for range 10 {
		seen[pair(t, p, &pdflow.PickInput{Single: true})] = true
	}
	require.Equal(t, map[string]bool{"+d": true, "+x": true}, seen)
}

func TestAnEngineOfRoleBothServesAloneOnlyIfItMust(t *testing.T) {
	p := pick.New(set(t, engine{"x", "", both}), pick.RoundRobin())
	require.Equal(t, "+x", pair(t, p, &pdflow.PickInput{}))
	p = pick.New(set(t, engine{"x", "", both}, engine{"y", "", both}), pick.RoundRobin())
	for range 10 {
		require.Contains(t, []string{"x+y", "y+x"}, pair(t, p, &pdflow.PickInput{}))
	}
}

// Where decode engines cannot serve alone, one of role both runs without the connector: in a pair it would send
// nothing, or take nothing.
func TestEnginesOfRoleBothStayApartFromPairsThatNeedTheConnector(t *testing.T) {
	p := pick.New(
		set(t, engine{"p", "", prefill}, engine{"d", "", decode}, engine{"x", "", both}, engine{"y", "other", both}),
		pick.RoundRobin(),
	)
	apart := p.Bind(nil, pairOnly)
	for range 10 {
		require.Equal(t, "p+d", pair(t, apart, &pdflow.PickInput{}))
		require.Contains(t, []string{"+x", "+y"}, pair(t, apart, &pdflow.PickInput{Single: true}))
	}
	seen := map[string]bool{}
	for range 12 {
		seen[pair(t, p, &pdflow.PickInput{})] = true
	}
	require.Greater(t, len(seen), 1, "of other protocols they take both parts")

	apart = pick.New(set(t, engine{"d", "", decode}, engine{"x", "", both}), pick.RoundRobin()).Bind(nil, pairOnly)
	for range 4 {
		require.Equal(t, "+x", pair(t, apart, &pdflow.PickInput{}),
			"where there is no pair, it serves the whole request")
	}
	apart = pick.New(set(t, engine{"p", "", prefill}), pick.RoundRobin()).Bind(nil, pairOnly)
	_, err := apart.Pick(context.Background(), &pdflow.PickInput{})
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
}

// If no engine is ready, the client may retry later. If there is no engine for the request at all, a retry is useless,
// and the error says so.
func TestNobodyWhoServesAloneIsNotTheSameAsNobodyReady(t *testing.T) {
	alone := func(s *discovery.Set) error {
		_, err := pick.New(s, pick.RoundRobin()).Bind(nil, pairOnly).Pick(context.Background(),
			&pdflow.PickInput{Single: true})
		return err
	}
	s := set(t, engine{"p", "", prefill}, engine{"d", "", decode}, engine{"x", "", both})
	s.SetHealthy("x", false)
	err := alone(s)
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
	require.ErrorContains(t, err, "no engine that serves alone is ready")
	err = alone(set(t))
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint, "nothing is known yet")

	err = alone(set(t, engine{"p", "", prefill}, engine{"d", "", decode}))
	var e *pdflow.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, pdflow.CodeUnsupported, e.Code)
	require.NotErrorIs(t, err, pdflow.CodeNoEndpoint)
}

func TestTheNextAttemptAvoidsWhatFailedWhileOthersAreThere(t *testing.T) {
	p := pick.New(
		set(t, engine{"p1", "", prefill}, engine{"p2", "", prefill}, engine{"d1", "", decode},
			engine{"d2", "", decode}), pick.RoundRobin(),
	)
	for range 10 {
		require.Equal(t, "p2+d1", pair(t, p, &pdflow.PickInput{Avoid: []string{"p1", "d2"}}))
	}
	require.NotEmpty(t, pair(t, p, &pdflow.PickInput{Avoid: []string{"p1", "p2", "d1", "d2"}}),
		"the last engines are used all the same")
}

func failed(leg pdflow.LegKind, id string) *pdflow.Outcome {
	code := pdflow.CodePrefillFailed
	if leg == pdflow.LegDecode {
		code = pdflow.CodeDecodeFailed
	}
	return &pdflow.Outcome{Err: &pdflow.Error{Code: code, Leg: leg, Endpoint: id}}
}

func TestAnEngineCoolsDownAfterAFaultAndComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := pick.New(
			set(t, engine{"p1", "", prefill}, engine{"p2", "", prefill}, engine{"d1", "", decode},
				engine{"d2", "", decode}), pick.RoundRobin(),
		)
		x, err := p.Pick(context.Background(), &pdflow.PickInput{})
		require.NoError(t, err)
		x.Done(failed(pdflow.LegPrefill, "p1"))
		x.Done(failed(pdflow.LegDecode, "d2"))
		began := time.Now()
		for range 10 {
			require.Equal(t, "p2+d1", pair(t, p, &pdflow.PickInput{}))
		}
		x.Done(failed(pdflow.LegDecode, "d1"))
		require.NotEmpty(t, pair(t, p, &pdflow.PickInput{}), "a cooldown took the last engine of a role")
		for !strings.HasPrefix(pair(t, p, &pdflow.PickInput{}), "p1+") {
			require.Less(t, time.Since(began), 5*time.Second, "the cooldown does not end")
			time.Sleep(10 * time.Millisecond)
		}
		require.Greater(t, time.Since(began), 500*time.Millisecond)
	})
}

func TestWhatIsNotTheEnginesFaultStartsNoCooldown(t *testing.T) {
	p := pick.New(set(t, engine{"p1", "", prefill}, engine{"p2", "", prefill}, engine{"d1", "", decode}),
		pick.RoundRobin())
	x, err := p.Pick(context.Background(), &pdflow.PickInput{})
	require.NoError(t, err)
	for _, code := range []pdflow.Code{pdflow.CodeClientGone, pdflow.CodePrefillRejected, pdflow.CodeInternal} {
		x.Done(&pdflow.Outcome{Err: &pdflow.Error{Code: code, Endpoint: "p1"}})
	}
	seen := map[string]bool{}
	for range 10 {
		seen[pair(t, p, &pdflow.PickInput{})] = true
	}
	require.Len(t, seen, 2)
}

func TestAnEngineThatIsNotReadyIsNotPicked(t *testing.T) {
	s := set(t, engine{"p1", "", prefill}, engine{"p2", "", prefill}, engine{"d1", "", decode})
	p := pick.New(s, pick.RoundRobin())
	s.SetHealthy("p1", false)
	for range 10 {
		require.Equal(t, "p2+d1", pair(t, p, &pdflow.PickInput{}))
	}
	s.SetHealthy("p2", false)
	_, err := p.Pick(context.Background(), &pdflow.PickInput{})
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
}
