// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// A prefill leg that runs on after its request keeps its engine's load until it ends; decode's load ends with Done.
func TestAPrefillThatRunsOnKeepsItsLoad(t *testing.T) {
	p := pick.New(newFleet(t, many(2, 2)...).Set, pick.LeastLoad())
	long, short := request(t, "a long prompt, which weighs more than all of the others together", 1), request(t, "a", 1)
	first := mustPick(t, p, &pdflow.PickInput{Request: long})
	o := ended(first, long, false, 500)
	o.PrefillRuns, o.Err = true, &pdflow.Error{Code: pdflow.CodeClientGone}
	first.Done(o)
	decodes := map[string]bool{}
	for range 4 {
		x := mustPick(t, p, &pdflow.PickInput{Request: short})
		require.NotEqual(t, first.Prefill.ID, x.Prefill.ID, "the leg's load is gone")
		decodes[x.Decode.ID] = true
		x.PrefillDone(nil)
		x.Done(ended(x, short, true, 0))
	}
	require.Len(t, decodes, 2, "decode's load is still there")
	first.PrefillDone(nil)
	first.PrefillDone(nil)
	prefills := map[string]bool{}
	for range 4 {
		x := mustPick(t, p, &pdflow.PickInput{Request: short})
		prefills[x.Prefill.ID] = true
	}
	require.Len(t, prefills, 2)
}
