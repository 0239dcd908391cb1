// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Ready returns the same error as Pick for every set of engines.
func TestReadyAgreesWithPick(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	said := map[string]int{}
	for range 300 {
		var eps []discovery.Endpoint
		for i := range random.IntN(4) {
			e := ep("e"+strconv.Itoa(i), []discovery.Role{prefill, decode, both, discovery.RoleEncode}[random.IntN(4)],
				"group="+strconv.Itoa(random.IntN(2)), "tpSize="+strconv.Itoa(1+random.IntN(2)))
			e.Phase = discovery.Phase(random.IntN(2))
			eps = append(eps, e)
		}
		p := pick.New(newFleet(t, eps...).Set, pick.RoundRobin())
		for _, flow := range []pdflow.Picker{p, p.Bind(nil, pairOnly), bind(p, sameTP()), p.Bind(sameTP(), pairOnly),
			p.Bind(nil, connector.Serving{PrefillPairOnly: true})} {
			for _, single := range []bool{false, true} {
				in := &pdflow.PickInput{Single: single}
				_, err := flow.Pick(context.Background(), in)
				got := flow.Ready(in)
				require.Equal(t, err, got, "%+v", eps)
				if said["ready"]++; got != nil {
					said[got.Error()]++
				}
			}
		}
	}
	assert.Greater(t, len(said), 6, "the engines were of all kinds: %v", said)
}

func TestReadyWantsAnEncodeEngineForAnEncodeStage(t *testing.T) {
	f := newFleet(t, ep("p", prefill), ep("d", decode))
	p := pick.New(f.Set, pick.RoundRobin())
	require.NoError(t, p.Ready(&pdflow.PickInput{}))
	err := p.Ready(&pdflow.PickInput{Encode: 1})
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
	require.ErrorContains(t, err, "no encode engine is ready")
	alone := pick.New(newFleet(t, ep("b", both)).Set, pick.RoundRobin())
	require.NoError(t, alone.Bind(nil, pairOnly).Ready(&pdflow.PickInput{Encode: 1, Single: true}),
		"there is no such stage where one engine serves")
	f.replace(ep("p", prefill), ep("d", decode), ep("e", discovery.RoleEncode))
	require.NoError(t, p.Ready(&pdflow.PickInput{Encode: 1}))
}

func TestReadyBeforeTheFirstSnapshot(t *testing.T) {
	err := pick.New(discovery.NewSet(), pick.RoundRobin()).Ready(&pdflow.PickInput{})
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
	require.ErrorContains(t, err, "the engines are not known yet")
}

// Ready does not choose engines: the position of round robin stays the same.
func TestReadyTakesNoTurn(t *testing.T) {
	p := pick.New(newFleet(t, ep("p1", prefill), ep("p2", prefill), ep("d", decode)).Set, pick.RoundRobin())
	seen := map[string]int{}
	for range 10 {
		require.NoError(t, p.Ready(&pdflow.PickInput{}))
		seen[mustPick(t, p, &pdflow.PickInput{}).Prefill.ID]++
	}
	assert.Equal(t, map[string]int{"p1": 5, "p2": 5}, seen)
}

func TestReadinessOfASidecar(t *testing.T) {
	none := newFleet(t, addressed(t, "d2", "http://10.0.0.5:8000", decode)).Set
	sick := addressed(t, "p", "http://10.0.0.1:8000", prefill)
	sick.Phase = discovery.PhaseNotReady
	ill := newFleet(t, sick).Set
	for name, c := range map[string]struct {
		set      *discovery.Set
		pairOnly bool
		ready    bool
	}{
		"decode serves alone":                          {none, false, true},
		"decode needs a pair, and nobody is there":     {none, true, false},
		"decode needs a pair, and prefill is not well": {ill, true, false},
		"decode needs a pair":                          {sidecarSet(t), true, true},
	} {
		p := pick.FromHeader(c.set, localDecode(t), &pick.HeaderOptions{PairOnly: c.pairOnly})
		err := p.Ready(&pdflow.PickInput{})
		assert.Equal(t, c.ready, err == nil, name)
		if err != nil {
			assert.ErrorIs(t, err, pdflow.CodeNoEndpoint, name)
		}
	}
}

// If a whole request would crash an engine that can prefill, only engines of role decode serve alone.
func TestPrefillPairOnlyPicksNoEngineThatCanPrefill(t *testing.T) {
	f := newFleet(t, ep("b", both), ep("p", prefill), ep("d", decode))
	p, in := pick.New(f.Set, pick.RoundRobin()), &pdflow.PickInput{Single: true}
	flow := p.Bind(nil, connector.Serving{PrefillPairOnly: true})
	seen := map[string]int{}
	for range 6 {
		seen[mustPick(t, flow, in).Decode.ID]++
		mustPick(t, p, in)
	}
	assert.Equal(t, map[string]int{"d": 6}, seen)
	f.replace(ep("b", both), ep("p", prefill))
	err := flow.Ready(in)
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
	require.ErrorContains(t, err, "no decode engine is ready")
}
