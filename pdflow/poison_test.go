// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
)

// Both attempts at a request fail that each prefill engine answers with 500, and still the requests after it go to all
// engines in turn. An engine that is broken gets its cooldown when two different bodies have failed at it.
func TestAnEnginesCooldownNeedsFaultsOfTwoBodies(t *testing.T) {
	engines := make([]*enginesim.Engine, 2, 3)
	more := make([]discovery.Endpoint, 2)
	for i := range engines {
		e, err := enginesim.Start(enginesim.Config{Connector: "nixl", KVRole: enginesim.RoleProducer})
		require.NoError(t, err)
		defer e.Close()
		engines[i], more[i] = e, endpoint(t, e.URL(), discovery.RolePrefill)
	}
	x := start(t, setup{more: more})
	engines = append(engines, x.p)
	fail := enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Leg: enginesim.LegPrefill, Count: -1}

	for _, e := range engines {
		e.Inject(fail)
	}
	require.Equal(t, 502, post(t, x.url, "/v1/completions", completion("poison", "")).status)
	for _, e := range engines {
		e.ClearFaults()
	}
	served, failed := map[string]int{}, map[string]int{}
	var lastFault, rest time.Time // after rest, faults do not count
	serve := func(prompt string) {
		before := len(x.seen.list())
		require.Equal(t, 200, post(t, x.url, "/v1/completions", completion(prompt, "")).status)
		require.Eventually(t, func() bool { // the outcome comes a moment after the response
			all := x.seen.list()
			return len(all) > before && all[len(all)-1].Err == nil
		}, 20*time.Second, time.Millisecond)
		for _, o := range x.seen.list()[before:] {
			switch {
			case o.Err == nil:
				served[o.Prefill.Endpoint]++
			case rest.IsZero() || o.Session.CreatedAt.Before(rest):
				failed[o.Prefill.Endpoint]++
				lastFault = o.Prefill.End
			}
		}
	}
	for range 6 {
		serve(longPrompt)
	}
	for _, n := range served {
		require.Equal(t, 2, n, "%v", served)
	}
	require.Len(t, served, 3)

	x.p.Inject(fail)
	for range 6 {
		serve("the same")
	}
	broken := endpoint(t, x.p.URL(), discovery.RolePrefill).ID
	require.GreaterOrEqual(t, failed[broken], 2, "one body's faults put it on cooldown")
	clear(failed)
	for n := range 6 {
		serve(fmt.Sprint("another ", n))
		if failed[broken] == 1 && rest.IsZero() {
			rest = lastFault.Add(time.Second) // the cooldown ends no earlier
		}
	}
	require.Equal(t, 1, failed[broken], "a second body's fault puts it on cooldown")
}
