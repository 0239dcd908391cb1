// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"fmt"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Engines of one tensor-parallel size meet, the less loaded ones of two first.
func ExampleNew() {
	engine := func(id string, role discovery.Role, tp string) discovery.Endpoint {
		e, err := discovery.New("http://"+id+":8000", role)
		if err != nil {
			panic(err)
		}
		e.ID, e.Attributes = id, map[string]string{"tpSize": tp}
		return e
	}
	source, err := static.New(engine("p-small", discovery.RolePrefill, "2"), engine("p-large", discovery.RolePrefill, "8"), engine("d", discovery.RoleDecode, "8"))
	if err != nil {
		panic(err)
	}
	set := discovery.NewSet(source)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = set.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	if err := set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return s.Version > 0 }); err != nil {
		panic(err)
	}

	picker := pick.New(set, pick.TwoChoices(), pick.WithRules(pick.SameValue("tpSize")))
	pair, err := picker.Pick(ctx, &pdflow.PickInput{})
	if err != nil {
		panic(err)
	}
	fmt.Println(pair.Prefill.ID, pair.Decode.ID)
	pair.PrefillDone() // a flow calls these
	pair.Done(&pdflow.Outcome{})
	// Output: p-large d
}
