// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestEachPolicyChoosesByTheRequestsModel(t *testing.T) {
	of := func(t *testing.T, model string) *pdflow.PickInput {
		r, err := connector.ParseRequest(connector.APICompletions,
			[]byte(`{"model":`+strconv.Quote(model)+`,"prompt":"x"}`))
		require.NoError(t, err)
		return &pdflow.PickInput{Request: r}
	}
	engines := []discovery.Endpoint{
		ep("pa", prefill, "model=a"), ep("da", decode, "model=a"), ep("pb", prefill, "model=b"),
		ep("db", decode, "model=b"), ep("p", prefill), ep("d", decode),
		ep("ea", discovery.RoleEncode, "model=a"), ep("eb", discovery.RoleEncode, "model=b"),
	}
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		f := newFleet(t, engines...)
		p := pick.New(f.Set, policy, pick.ByModel(), pick.WithBound(1, 0), pick.WithSeed(1))
		for round := range 2 {
			for model, want := range map[string][]string{"a": {"pa+da", "pa+d", "p+da", "p+d"},
				"b": {"pb+db", "pb+d", "p+db", "p+d"}, "a-lora": {"p+d"}} {
				seen := map[string]bool{}
				for range 200 {
					in := of(t, model)
					in.Encode = 2
					x := mustPick(t, p, in)
					seen[x.Prefill.ID+"+"+x.Decode.ID] = true
					if model != "a-lora" {
						require.Equal(t, "e"+model, x.Encode[0].ID)
					}
					require.LessOrEqual(t, len(x.Encode), 1)
					in.Single = true
					require.Contains(t, []string{"d", "d" + model}, mustPick(t, p, in).Decode.ID)
				}
				only(t, policy, seen, want...)
			}
			f.replace(append(engines, ep("c", prefill, "model=c"+strconv.Itoa(round), "group=c"))...)
		}
		for _, in := range []*pdflow.PickInput{{}, of(t, "")} { // they name none
			seen := map[string]bool{}
			for range 200 {
				seen[pair(t, p, in)] = true
			}
			only(t, policy, seen, "pa+da", "pa+d", "p+da", "p+d", "pb+db", "pb+d", "p+db")
		}
		f.replace(ep("pa", prefill, "model=a"), ep("da", decode, "model=a"))
		require.Equal(t, "pa+da", pair(t, p, of(t, "a")), "one model is all there is")
		for _, single := range []bool{false, true} {
			in := of(t, "secret")
			in.Single = single
			_, err := p.Bind(nil, connector.Serving{PairOnly: single}).Pick(context.Background(), in)
			require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
			require.ErrorContains(t, err, "no engine here serves the model")
			require.NotContains(t, err.Error(), "secret")
		}
		f.replace(ep("d", decode))
		_, err := p.Pick(context.Background(), of(t, "a"))
		require.ErrorContains(t, err, "no prefill engine is ready")
		f.replace(many(1, 1)...)
		require.Equal(t, "p0+d0", pair(t, p, of(t, "a")), "no engine tells")
		f.replace()
		_, err = p.Pick(context.Background(), of(t, "a"))
		require.ErrorContains(t, err, "no engine is ready")
	})
}

// Engines that have loaded an adapter serve the requests for it. Where there is no pair of them, the others are to load
// it.
func TestRequestsForAnAdapterGoWhereItIsLoaded(t *testing.T) {
	of := func(model string) *pdflow.PickInput {
		r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"model":"`+model+`","prompt":"x"}`))
		require.NoError(t, err)
		return &pdflow.PickInput{Request: r, Encode: 1}
	}
	for _, byModel := range []bool{false, true} {
		eachPolicy(t, func(t *testing.T, policy pick.Policy) {
			f := newFleet(t, ep("p0", prefill, "model=m"), ep("d0", decode, "model=m", "adapters=y"),
				ep("p1", prefill, "model=m", "adapters=x, y,,x"), ep("d1", decode, "model=m", "adapters=x"),
				ep("p2", prefill, "model=n"), ep("d2", decode, "model=n"),
				ep("e1", discovery.RoleEncode, "model=m"), ep("e2", discovery.RoleEncode, "model=n"))
			opts := []pick.Option{pick.WithSeed(1)}
			if byModel {
				opts = append(opts, pick.ByModel())
			}
			p := pick.New(f.Set, policy, opts...)
			for model, want := range map[string]string{"x": "p1+d1 e1", "y": "p1+d0 e1"} {
				for range 20 {
					x := mustPick(t, p, of(model))
					require.Equal(t, want, x.Prefill.ID+"+"+x.Decode.ID+" "+x.Encode[0].ID)
				}
			}
			f.replace(ep("p0", prefill), ep("d0", decode), ep("d1", decode, "adapters=x"))
			require.Equal(t, "p0", mustPick(t, p, of("x")).Prefill.ID, "no prefill engine has loaded it")
			alone := of("x")
			alone.Single = true
			require.Equal(t, "d1", mustPick(t, p, alone).Decode.ID)
		})
	}
}

func TestWithoutByModelARequestMayNameAnything(t *testing.T) {
	p := pick.New(newFleet(t, many(1, 1, "model=base")...).Set, pick.RoundRobin())
	require.Equal(t, "p0+d0", pair(t, p, input(t, 1)))
}

// Load on an engine of unknown model is seen by the requests for each model.
func TestModelsShareTheLoadOfEnginesThatServeBoth(t *testing.T) {
	eps := []discovery.Endpoint{ep("p", prefill), ep("d", decode), ep("dm", decode, "model=m"),
		ep("dn", decode, "model=n")}
	p := pick.New(newFleet(t, eps...).Set, pick.LeastLoad(), pick.ByModel())
	ask := func(model string, limit int) pdflow.Pick {
		r, err := connector.ParseRequest(connector.APICompletions,
			[]byte(`{"model":"`+model+`","prompt":"x","max_tokens":`+strconv.Itoa(limit)+`}`))
		require.NoError(t, err)
		return mustPick(t, p, &pdflow.PickInput{Request: r})
	}
	require.Equal(t, "d", ask("none", 30_000).Decode.ID)
	for range 20 {
		require.Equal(t, "dm", ask("m", 1).Decode.ID)
		require.Equal(t, "dn", ask("n", 1).Decode.ID)
	}
}
