// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"fmt"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// known returns a set of engines, each with its role and some attributes.
func known(engines map[string]discovery.Endpoint) *discovery.Set {
	var all []discovery.Endpoint
	for id, like := range engines {
		e, err := discovery.New("http://"+id+":8000", like.Role)
		if err != nil {
			panic(err)
		}
		e.ID, e.Attributes, e.Model = id, like.Attributes, like.Model
		all = append(all, e)
	}
	set, err := static.NewSet(all...)
	if err != nil {
		panic(err)
	}
	return set
}

// Only engines of the same tensor-parallel size form pairs. A connector that needs this declares it itself (see
// [connector.Traits]); the option is for rules that only the fleet's owner knows.
func ExampleNew() {
	tp := func(size string) map[string]string { return map[string]string{"tpSize": size} }
	set := known(map[string]discovery.Endpoint{
		"p-small": {Role: discovery.RolePrefill, Attributes: tp("2")},
		"p-large": {Role: discovery.RolePrefill, Attributes: tp("8")},
		"d":       {Role: discovery.RoleDecode, Attributes: tp("8")},
	})

	picker := pick.New(set, pick.TwoChoices(), pick.WithRules(attr.Same("tpSize")))
	pair, err := picker.Pick(context.Background(), &pdflow.PickInput{})
	if err != nil {
		panic(err)
	}
	fmt.Println(pair.Prefill.ID, pair.Decode.ID)
	pair.PrefillDone(&pdflow.LegOutcome{}) // a flow calls these
	pair.Done(&pdflow.Outcome{})
	// Output: p-large d
}

// Two fleets in one set, as in a rollout: engines tell by the attribute connector which ones they run, and flows of
// each find their own.
func ExampleNew_rollout() {
	run := func(name string) map[string]string { return map[string]string{"connector": name} }
	set := known(map[string]discovery.Endpoint{
		"p-old": {Role: discovery.RolePrefill, Attributes: run("NixlConnector")},
		"d-old": {Role: discovery.RoleDecode, Attributes: run("NixlConnector")},
		"p-new": {Role: discovery.RolePrefill, Attributes: run("lmcache")},
		"d-new": {Role: discovery.RoleDecode, Attributes: run("lmcache")},
	})

	picker := pick.New(set, pick.LeastLoad()) // one for both, so that they see each other's load
	for _, spec := range []config.Spec{{Type: "nixl"}, {Type: "lmcache"}} {
		conn, err := connector.Open(spec)
		if err != nil {
			panic(err)
		}
		bound := picker.Bind(conn, conn.Traits().Serving) // as a flow does
		pair, err := bound.Pick(context.Background(), &pdflow.PickInput{})
		if err != nil {
			panic(err)
		}
		fmt.Println(conn.Traits().Name, pair.Prefill.ID, pair.Decode.ID)
		pair.Done(&pdflow.Outcome{})
	}
	// Output:
	// nixl p-old d-old
	// lmcache p-new d-new
}

// Several base models behind one picker.
func ExampleByModel() {
	set := known(map[string]discovery.Endpoint{
		"p-small": {Role: discovery.RolePrefill, Model: "small"},
		"d-small": {Role: discovery.RoleDecode, Model: "small"},
		"p-large": {Role: discovery.RolePrefill, Model: "large"},
		"d-large": {Role: discovery.RoleDecode, Model: "large"},
	})

	picker := pick.New(set, pick.PrefixAffinity(), pick.ByModel())
	request, err := connector.ParseRequest(connector.APICompletions, []byte(`{"model":"large","prompt":"Hello"}`))
	if err != nil {
		panic(err)
	}
	pair, err := picker.Pick(context.Background(), &pdflow.PickInput{Request: request})
	if err != nil {
		panic(err)
	}
	fmt.Println(pair.Prefill.ID, pair.Decode.ID)
	pair.Done(&pdflow.Outcome{})
	// Output: p-large d-large
}

// A host that knows which pair is best says only that. Here the engines that hold a session's KV are best, unless they
// have failed the request: that is the picker's to see.
func ExampleScore() {
	set := known(map[string]discovery.Endpoint{
		"p-0": {Role: discovery.RolePrefill}, "p-1": {Role: discovery.RolePrefill},
		"d-0": {Role: discovery.RoleDecode}, "d-1": {Role: discovery.RoleDecode},
	})

	holds := map[string]bool{"p-1": true, "d-0": true}
	picker := pick.New(set, pick.Score(func(_ *pdflow.PickInput, p, d *discovery.Endpoint) (score float64) {
		if p != nil && holds[p.ID] { // nil: one engine is to serve alone
			score += 2
		}
		if holds[d.ID] {
			score++
		}
		return score
	}))
	for _, in := range []*pdflow.PickInput{{}, {Avoid: []string{"p-1"}}, {Decode: "d-1"}, {Single: true}} {
		pair, err := picker.Pick(context.Background(), in)
		if err != nil {
			panic(err)
		}
		fmt.Printf("%q %q\n", pair.Prefill.ID, pair.Decode.ID)
		pair.Done(&pdflow.Outcome{})
	}
	// Output:
	// "p-1" "d-0"
	// "p-0" "d-0"
	// "p-1" "d-1"
	// "" "d-0"
}

// A scheduler that chooses the pair by itself is a picker, too.
func ExampleFunc() {
	prefill, err := discovery.New("http://10.0.0.1:8000", discovery.RolePrefill)
	if err != nil {
		panic(err)
	}
	decode, err := discovery.New("http://10.0.0.2:8000", discovery.RoleDecode)
	if err != nil {
		panic(err)
	}
	schedule := func(_ context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
		if in.Avoids(decode.ID) { // it failed in an attempt before, and there is no other one
			return pdflow.Pick{}, pdflow.CodeNoEndpoint
		}
		return pdflow.Pick{Prefill: prefill, Decode: decode}, nil
	}
	conn, err := connector.Open(config.Spec{Type: "nixl"})
	if err != nil {
		panic(err)
	}
	flow, err := pdflow.New(conn, pick.Func(schedule))
	if err != nil {
		panic(err)
	}
	fmt.Println(flow.Ready(context.Background()))
	// Output: <nil>
}

// A prober beside a flow tries pairs at which requests ran out of time, before the flow sends clients there again.
func ExampleProber() {
	set := known(map[string]discovery.Endpoint{
		"p": {Role: discovery.RolePrefill}, "d1": {Role: discovery.RoleDecode}, "d2": {Role: discovery.RoleDecode},
	})
	picker := pick.New(set, pick.LeastLoad())
	transfers, err := plainhttp.New(nil)
	if err != nil {
		panic(err)
	}
	flow, err := pdflow.New(transfers, picker, pdflow.WithTimeouts(config.Timeouts{Transfer: 30 * time.Second}))
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background()) // the program's
	prober := pick.Prober{Picker: picker, Flows: []*pdflow.Flow{flow},
		OnProbe: func(prefill, decode string, r pick.ProbeResult, _ error) { fmt.Println(prefill, decode, r) }}
	ended := make(chan error)
	go func() { ended <- prober.Run(ctx) }()
	// … serve …
	cancel()
	fmt.Println(<-ended, flow.Shutdown(context.Background()))
	// Output: <nil> <nil>
}

// telling is a picker around another one, which hands on all that it does not do otherwise.
type telling struct{ pick.Around }

func (n telling) Bind(c connector.KVConnector, serving connector.Serving) pdflow.Picker {
	return telling{pick.NewAround(n.Around.Bind(c, serving))}
}

func (n telling) Pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	out, err := n.Around.Pick(ctx, in)
	fmt.Println("decode is", out.Decode.ID)
	return out, err
}

// A picker that tells what another one picks.
func ExampleAround() {
	set := known(map[string]discovery.Endpoint{"p0": {Role: discovery.RolePrefill}, "d0": {Role: discovery.RoleDecode}})
	var picker pdflow.Picker = telling{pick.NewAround(pick.New(set, pick.RoundRobin()))}
	if _, err := picker.Bind(nil, connector.Serving{}).Pick(context.Background(), &pdflow.PickInput{}); err != nil {
		panic(err)
	}
	fmt.Println(picker.(pdflow.EngineNamer).NamesEngine("d0"), picker.Ready(&pdflow.PickInput{}))
	// Output:
	// decode is d0
	// true <nil>
}
