// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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

// Where decode engines cannot serve alone, one of role both runs without the connector: in a pair it would send
// nothing, or take nothing.
func TestEnginesOfRoleBothStayApartFromPairsThatNeedTheConnector(t *testing.T) {
	p := pick.New(
		newFleet(t, ep("p", prefill), ep("d", decode), ep("x", both), ep("y", both, "group=other")).Set,
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

	apart = pick.New(newFleet(t, ep("d", decode), ep("x", both)).Set, pick.RoundRobin()).Bind(nil, pairOnly)
	for range 4 {
		require.Equal(t, "+x", pair(t, apart, &pdflow.PickInput{}),
			"where there is no pair, it serves the whole request")
	}
	apart = pick.New(newFleet(t, ep("p", prefill)).Set, pick.RoundRobin()).Bind(nil, pairOnly)
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
	s := newFleet(t, ep("p", prefill), ep("d", decode), ep("x", both)).Set
	s.SetHealthy("x", false)
	err := alone(s)
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
	require.ErrorContains(t, err, "no engine that serves alone is ready")
	err = alone(newFleet(t).Set)
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint, "nothing is known yet")

	err = alone(newFleet(t, ep("p", prefill), ep("d", decode)).Set)
	var e *pdflow.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, pdflow.CodeUnsupported, e.Code)
	require.NotErrorIs(t, err, pdflow.CodeNoEndpoint)
}

func failed(leg pdflow.LegKind, id string) *pdflow.Outcome {
	code := pdflow.CodePrefillFailed
	if leg == pdflow.LegDecode {
		code = pdflow.CodeDecodeFailed
	}
	return &pdflow.Outcome{Err: &pdflow.Error{Code: code, Leg: leg, Endpoint: id}}
}

func TestWhatIsNotTheEnginesFaultStartsNoCooldown(t *testing.T) {
	p := pick.New(newFleet(t, ep("p1", prefill), ep("p2", prefill), ep("d1", decode)).Set,
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
