// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/p2pnccl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestWhoCanMeet(t *testing.T) {
	tp := []pick.Option{pick.WithRules(attr.Same("tpSize"))}
	multiple := []pick.Option{pick.WithRules(attr.Multiple("tpSize"))}
	zones := []pick.Option{pick.WithRules(attr.Shared("fabrics"))}
	for name, c := range map[string]struct {
		p, d []string
		opts []pick.Option
		meet bool
	}{
		"alike":               {nil, nil, nil, true},
		"other group":         {[]string{"group=a"}, []string{"group=b"}, nil, false},
		"no group is a group": {nil, []string{"group=b"}, nil, false},
		"same model":          {[]string{"model=m"}, []string{"model=m"}, nil, true},
		"other model":         {[]string{"model=m"}, []string{"model=n"}, nil, false},
		"model unknown":       {nil, []string{"model=n"}, nil, true},
		"other version":       {[]string{"version=1"}, []string{"version=2"}, nil, false},
		"version unknown":     {[]string{"version=1"}, nil, nil, true},
		"other version allowed": {[]string{"version=1"}, []string{"version=2"},
			[]pick.Option{pick.WithAnyVersion()}, true},
		"TP without a rule":          {[]string{"tpSize=2"}, []string{"tpSize=4"}, nil, true},
		"TP differs":                 {[]string{"tpSize=2"}, []string{"tpSize=4"}, tp, false},
		"TP is the same":             {[]string{"tpSize=2"}, []string{"tpSize=2"}, tp, true},
		"TP unknown":                 {[]string{"tpSize=2"}, nil, tp, true},
		"TP divides":                 {[]string{"tpSize=8"}, []string{"tpSize=4"}, multiple, true},
		"TP does not divide":         {[]string{"tpSize=2"}, []string{"tpSize=3"}, multiple, false},
		"TP is no number":            {[]string{"tpSize=2"}, []string{"tpSize=x"}, multiple, false},
		"a network in common":        {[]string{"kvNetwork=ib0, roce"}, []string{"kvNetwork=roce,eth"}, nil, true},
		"no network in common":       {[]string{"kvNetwork=ib0"}, []string{"kvNetwork=eth"}, nil, false},
		"no network told":            {[]string{"kvNetwork=ib0"}, nil, nil, true},
		"a list with nothing shared": {[]string{"fabrics=a"}, []string{"fabrics=b,c"}, zones, false},
		"empty elements are nothing": {[]string{"kvNetwork=a,,b"}, []string{"kvNetwork=c,"}, nil, false},
		"a connector in common": {[]string{"connector=nixl, lmcache"}, []string{"connector=NixlConnector"}, nil,
			true},
		"no connector in common": {[]string{"connector=nixl"}, []string{"connector=lmcache"}, nil, false},
		"no connector told":      {[]string{"connector=nixl"}, []string{"connector= ,"}, nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			eachPolicy(t, func(t *testing.T, policy pick.Policy) {
				p := pick.New(newFleet(t, ep("p", prefill, c.p...), ep("d", decode, c.d...)).Set, policy, c.opts...)
				x, err := p.Pick(context.Background(), &pdflow.PickInput{})
				if !c.meet {
					require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
					return
				}
				require.NoError(t, err)
				require.Equal(t, "p", x.Prefill.ID)
			})
		})
	}
}

// While a fleet is upgraded, both versions serve, each by itself, and an engine that does not tell its version with
// either.
func TestBothVersionsServeDuringAnUpgrade(t *testing.T) {
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		eps := append(many(2, 2, "version=1"), ep("P", prefill, "version=2"), ep("D", decode, "version=2"),
			ep("p-any", prefill),
			ep("D3", decode, "version=3"), ep("lost", prefill, "version=9"))
		p := pick.New(newFleet(t, eps...).Set, policy, pick.WithBound(1, 0))
		allowed := map[string][]string{"d0": {"p0", "p1", "p-any"}, "d1": {"p0", "p1", "p-any"}, "D": {"P", "p-any"},
			"D3": {"p-any"}}
		seen := map[string]bool{}
		for i := range 300 {
			x := mustPick(t, p, input(t, i))
			require.Contains(t, allowed[x.Decode.ID], x.Prefill.ID)
			seen[x.Decode.ID] = true
		}
		require.Len(t, seen, 4)
	})
}

// A pick that finds no pair says which role is missing, or what the nearest two engines lack, and names neither.
func TestWhatKeepsEnginesApartIsNamed(t *testing.T) {
	const cannot = "no prefill and decode engines that can exchange KV are ready: "
	tp := pick.WithRules(attr.Same("tpSize"), attr.Same("blockSize"))
	for message, engines := range map[string][]discovery.Endpoint{
		"no engine is ready":         nil,
		"no prefill engine is ready": {ep("d", decode)},
		"no decode engine is ready":  {ep("p", prefill)},
		"no prefill and decode engines of one group are ready": {ep("p", prefill, "group=a"),
			ep("d", decode, "group=b")},
		cannot + "they do not both run this connector": {ep("p", prefill, "connector=nixl"),
			ep("d", decode, "connector=lmcache")},
		cannot + "their models differ": {ep("p", prefill, "model=m"),
			ep("d", decode, "model=n"), ep("d2", decode, "connector=lmcache")},
		cannot + "their versions differ": {ep("p", prefill, "version=1", "model=m"),
			ep("d", decode, "version=2"), ep("d2", decode, "model=n")},
		cannot + "by their attribute kvNetwork": {ep("p", prefill, "kvNetwork=a"),
			ep("d", decode, "kvNetwork=b", "tpSize=2")},
		cannot + "by their attribute tpSize": {ep("p", prefill, "tpSize=1"),
			ep("d", decode, "tpSize=2")},
		cannot + "by their attribute blockSize": {ep("p", prefill, "blockSize=16"),
			ep("d", decode, "blockSize=128"), ep("x", prefill, "connector=lmcache"), ep("d2", decode, "group=b")},
	} {
		p := bind(pick.New(newFleet(t, engines...).Set, pick.RoundRobin(), tp), &protocol{name: "nixl"})
		_, err := p.Pick(context.Background(), &pdflow.PickInput{})
		var e *pdflow.Error
		require.ErrorAs(t, err, &e)
		require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
		require.Equal(t, message, e.Message)
	}
	p := pick.New(newFleet(t, ep("p", prefill, "version=1"), ep("d", decode, "version=2")).Set, pick.RoundRobin())
	_, err := p.Bind(nil, pairOnly).Pick(context.Background(), &pdflow.PickInput{Single: true})
	require.ErrorContains(t, err, "no engine here serves alone")
	require.Equal(t, discovery.RoleDecode, mustPick(t, p, &pdflow.PickInput{Single: true}).Decode.Role)
}

func TestPoliciesHaveNames(t *testing.T) {
	for _, good := range append(pick.Policies(), "session=X-User", "zone=eu-1") {
		_, err := pick.ParsePolicy(good)
		require.NoError(t, err, good)
	}
	for _, bad := range []string{"", "fastest", "random=1", "zone=", "prefix="} {
		_, err := pick.ParsePolicy(bad)
		require.Error(t, err, bad)
	}
	require.Equal(t, "round-robin", pick.Policy{}.String())
}

// An engine whose entry the connector can do nothing with fails each request of a pair: it takes no part in pairs, and
// serves alone where decode engines may.
func TestEnginesThatTheConnectorCanDoNothingWithAreLeftOut(t *testing.T) {
	conn, err := p2pnccl.New(nil)
	require.NoError(t, err)
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		engines := newFleet(t, ep("p", prefill, "zmqAddress=10.0.0.1:21001"),
			ep("bad-p", prefill, "zmqAdress=10.0.0.2:21001"), ep("d", decode, "zmqAddress=10.0.0.3:21001"),
			ep("bad-d", decode, "zmqAddress=nowhere"))
		p := bind(pick.New(engines.Set, policy), conn)
		for i := range 40 {
			require.Equal(t, "p+d", pair(t, p, input(t, i)))
		}
		alone := map[string]bool{}
		for i := range 40 {
			in := input(t, i)
			in.Single = true
			x := mustPick(t, p, in)
			x.Done(&pdflow.Outcome{})
			alone[x.Decode.ID] = true
		}
		require.Contains(t, alone, "bad-d")
		require.NotContains(t, alone, "bad-p")

		p = pick.New(newFleet(t, ep("p", prefill), ep("d", decode, "zmqAddress=10.0.0.3:21001")).Set, policy)
		_, err := bind(p, conn).Pick(context.Background(), &pdflow.PickInput{})
		require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
		require.ErrorContains(t, err, "no engines are ready whose entries have the attributes that the connector needs")
	})
}
