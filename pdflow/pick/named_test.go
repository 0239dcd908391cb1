// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"errors"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// twoGroups are two groups of engines of which each prefill engine can be paired with the decode engines of its group.
func twoGroups() []discovery.Endpoint {
	var eps []discovery.Endpoint
	for _, group := range []string{"a", "b"} {
		for i := range 3 {
			n := strconv.Itoa(i)
			eps = append(eps, ep("p"+group+n, prefill, "group="+group),
				ep("d"+group+n, decode, "group="+group, "dpSize=2"))
		}
	}
	return eps
}

func TestTheEngineThatARequestNamesServesWithAnyThatFits(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		f := newFleet(t, twoGroups()...)
		for _, in := range []pdflow.PickInput{{Decode: "db1"}, {Prefill: "pb1"}, {Prefill: "pb2", Decode: "db0"},
			{Prefill: "pb1", Avoid: []string{"pb1", "pa0", "db0"}}, {Decode: "db1", Avoid: []string{"db1", "pb0"}}} {
			p := pick.New(f.Set, policy)
			in.Request = request(t, "x", 1)
			partners, ranks := map[string]bool{}, map[discovery.Rank]bool{}
			for range 64 {
				x := mustPick(t, p, &in)
				if in.Decode != "" {
					require.Equal(t, in.Decode, x.Decode.ID)
				}
				if in.Prefill != "" {
					require.Equal(t, in.Prefill, x.Prefill.ID)
				}
				require.Equal(t, "b", x.Prefill.Group)
				require.Equal(t, "b", x.Decode.Group)
				partners[x.Prefill.ID+x.Decode.ID], ranks[x.DecodeRank] = true, true
				require.False(t, in.Decode == "" && in.Avoids(x.Decode.ID))
				require.False(t, in.Prefill == "" && in.Avoids(x.Prefill.ID))
				x.Done(&pdflow.Outcome{})
			}
			assert.Len(t, ranks, 2, "the picker chooses the rank")
			if policy.String() == "sticky" || policy.String() == "prefix" { // they keep to what they know
				continue
			}
			assert.Len(t, partners, 3-len(in.Avoid)/2-2*min(len(in.Prefill)*len(in.Decode), 1), "%+v", in)
		}
	})
}

func TestANamedEngineThatServesAloneIsTheOnlyOne(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		f := newFleet(t, append(twoGroups(), ep("x", both, "group=c"), ep("y", both, "group=b"))...)
		p := pick.New(f.Set, policy)
		for range 8 {
			require.Equal(t, "+db1", pair(t, p, &pdflow.PickInput{Single: true, Decode: "db1", Prefill: "pa0"}))
			require.Equal(t, "+x", pair(t, p, &pdflow.PickInput{Decode: "x"}), "nobody else is in its group")
			require.Equal(t, "+x", pair(t, p, &pdflow.PickInput{Prefill: "x"}))
			require.Equal(t, "+x", pair(t, p, &pdflow.PickInput{Prefill: "x", Decode: "x"}))
			require.Equal(t, "pb0+y", pair(t, p, &pdflow.PickInput{Prefill: "pb0", Decode: "y"}))
			require.Equal(t, "y", mustPick(t, p, &pdflow.PickInput{Prefill: "y"}).Prefill.ID)
			require.Equal(t, "y", mustPick(t, p, &pdflow.PickInput{Decode: "y"}).Decode.ID)
		}
		only := pick.New(f.Set, policy).Bind(nil, pairOnly)
		require.Equal(t, "+x", pair(t, only, &pdflow.PickInput{Decode: "x"}), "it runs without the connector")
		require.Equal(t, "+y", pair(t, only, &pdflow.PickInput{Single: true, Decode: "y"}))
	})
}

// A client whose engine comes back may try again; one whose engine is gone must not.
func TestWhyANamedEngineDoesNotServe(t *testing.T) {
	f := newFleet(t, append(twoGroups(), ep("x", both, "group=c"))...)
	f.SetHealthy("pa1", false)
	f.SetHealthy("da1", false)
	for _, c := range []struct {
		in      pdflow.PickInput
		serving connector.Serving
		code    pdflow.Code
		param   string
	}{
		{pdflow.PickInput{Decode: "gone"}, anyAlone, pdflow.CodeNotFound, "decode"},
		{pdflow.PickInput{Prefill: "gone"}, anyAlone, pdflow.CodeNotFound, "prefill"},
		{pdflow.PickInput{Decode: "pa0"}, anyAlone, pdflow.CodeNotFound, "decode"},
		{pdflow.PickInput{Prefill: "da0"}, anyAlone, pdflow.CodeNotFound, "prefill"},
		{pdflow.PickInput{Decode: "gone", Single: true}, anyAlone, pdflow.CodeNotFound, "decode"},
		{pdflow.PickInput{Decode: "da1"}, anyAlone, pdflow.CodeNoEndpoint, ""},
		{pdflow.PickInput{Decode: "da1", Single: true}, anyAlone, pdflow.CodeNoEndpoint, ""},
		{pdflow.PickInput{Prefill: "pa1"}, anyAlone, pdflow.CodeNoEndpoint, ""},
		{pdflow.PickInput{Prefill: "pa0", Decode: "db0"}, anyAlone, pdflow.CodeNoEndpoint, ""},
		{pdflow.PickInput{Prefill: "x", Decode: "db0"}, pairOnly, pdflow.CodeNoEndpoint, ""},
		{pdflow.PickInput{Decode: "da0", Single: true}, pairOnly, pdflow.CodeUnsupported, ""},
		{pdflow.PickInput{Decode: "da1", Single: true}, pairOnly, pdflow.CodeUnsupported, ""},
		{pdflow.PickInput{Decode: "x", Single: true}, connector.Serving{PrefillPairOnly: true},
			pdflow.CodeUnsupported, ""},
	} {
		for _, policy := range []pick.Policy{pick.RoundRobin(), pick.PrefixAffinity()} {
			p := pick.New(f.Set, policy).Bind(nil, c.serving)
			_, err := p.Pick(t.Context(), &c.in)
			e, ok := errors.AsType[*pdflow.Error](err)
			require.True(t, ok, "%+v: %v", c.in, err)
			assert.Equal(t, c.code, e.Code, "%+v: %v", c.in, err)
			assert.Equal(t, c.param, e.Param)
			assert.NotContains(t, e.Message, c.in.Decode+c.in.Prefill, "clients read it")
		}
	}
	_, err := pick.New(discovery.NewSet(), pick.RoundRobin()).Pick(t.Context(), &pdflow.PickInput{Decode: "d"})
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint, "nothing is known yet")
	p := pick.New(f.Set, pick.RoundRobin())
	require.ErrorIs(t, p.Ready(&pdflow.PickInput{Decode: "gone"}), pdflow.CodeNotFound)
	require.NoError(t, p.Ready(&pdflow.PickInput{Decode: "da0"}))
}

// Its partner is chosen by what is known of pairs, whatever is known of the named engine.
func TestANamedEngineIsNotPairedWithWhomItFailed(t *testing.T) {
	for _, policy := range []pick.Policy{pick.TwoChoices(), pick.PrefixAffinity()} {
		for _, in := range []*pdflow.PickInput{{Decode: "d1"}, {Prefill: "p1"}} {
			p := pick.New(newFleet(t, many(3, 3)...).Set, policy)
			for range 2 {
				x := mustPick(t, p, in)
				x.Done(&pdflow.Outcome{Session: contract.NewSession(request(t, "x", 1), "", x.Prefill, x.Decode),
					Err: &pdflow.Error{Code: pdflow.CodeClientGone}, Orphan: true})
				for range 32 {
					y := mustPick(t, p, in)
					require.False(t, x.Prefill.ID == y.Prefill.ID && x.Decode.ID == y.Decode.ID)
					y.Done(&pdflow.Outcome{Err: &pdflow.Error{Code: pdflow.CodeCanceled}})
				}
			}
		}
	}
}

func TestTheSidecarGoesByTheProgramsChoice(t *testing.T) {
	p := pick.FromHeader(sidecarSet(t), localDecode(t), nil)
	in := named("10.0.0.1:8000")
	in.Decode = "local"
	require.Equal(t, "p1+local", pair(t, p, in))
	in.Prefill = "p2"
	require.Equal(t, "p2+local", pair(t, p, in), "the header is not read")
	for _, c := range []struct {
		in   pdflow.PickInput
		code pdflow.Code
	}{
		{pdflow.PickInput{Prefill: "gone"}, pdflow.CodeNotFound},
		{pdflow.PickInput{Prefill: "d2"}, pdflow.CodeNotFound},
		{pdflow.PickInput{Decode: "d2"}, pdflow.CodeNotFound},
		{pdflow.PickInput{Prefill: "sick"}, pdflow.CodeNoEndpoint},
	} {
		_, err := p.Pick(t.Context(), &c.in)
		require.ErrorIs(t, err, c.code, "%+v", c.in)
	}
	require.Equal(t, "+local", pair(t, p, &pdflow.PickInput{Prefill: "gone", Single: true}))
}

func TestAPickWithANamedEngineAllocatesNothing(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector allocates")
	}
	f := newFleet(t, many(64, 64)...)
	for _, policy := range []pick.Policy{pick.RoundRobin(), pick.LeastLoad(), pick.PrefixAffinity()} {
		p := pick.New(f.Set, policy)
		for _, in := range []*pdflow.PickInput{{Decode: "d7"}, {Prefill: "p9"}} {
			done := &pdflow.Outcome{}
			once := func() {
				x, err := p.Pick(t.Context(), in)
				if err != nil {
					t.Fatal(err)
				}
				x.Done(done)
			}
			once()
			assert.Zero(t, testing.AllocsPerRun(100, once))
		}
	}
}

func TestNamedEnginesAreFoundWhileTheListChanges(t *testing.T) {
	f := newFleet(t, twoGroups()...)
	p := pick.New(f.Set, pick.LeastLoad())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 200 {
			f.replace(append(twoGroups(), ep("x"+strconv.Itoa(i), prefill, "group=b"))...)
		}
	}()
	for {
		select {
		case <-done:
			return
		default:
		}
		x := mustPick(t, p, &pdflow.PickInput{Decode: "db2"})
		require.Equal(t, "db2", x.Decode.ID)
		require.Equal(t, "b", x.Prefill.Group)
		x.Done(&pdflow.Outcome{})
	}
}
