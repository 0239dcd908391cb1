// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// ended is what a flow tells of an attempt: the client's response is whole, or the prefill engine answered it with the
// status, or could not be reached (status 0).
func ended(x pdflow.Pick, r *connector.ClientRequest, good bool, status int) *pdflow.Outcome {
	o := &pdflow.Outcome{Session: contract.NewSession(r, "", x.Prefill, x.Decode),
		Prefill: pdflow.LegOutcome{Endpoint: x.Prefill.ID}, Decode: pdflow.LegOutcome{Endpoint: x.Decode.ID}}
	if good {
		return o
	}
	o.Err = &pdflow.Error{Code: pdflow.CodePrefillFailed, Leg: pdflow.LegPrefill, Phase: "response",
		Endpoint: x.Prefill.ID, Status: status}
	if status == 0 {
		o.Err.Phase = "connect"
	}
	return o
}

// under serves 200 good requests, one every 10 ms, with three prefill engines, while every 50 ms somebody sends a
// request that each of them answers with status 500. A flow tries that at two engines. under returns how many of the
// good requests each prefill engine got. poison makes the n-th bad request's prompt. If orphans is true, the two legs
// go out together, so that each bad request leaves a decode leg behind.
func under(t *testing.T, policy pick.Policy, poison func(n int) string, orphans bool) (prefills map[string]int) {
	prefills = map[string]int{}
	synctest.Test(t, func(t *testing.T) {
		p := pick.New(newFleet(t, many(3, 1)...).Set, policy, pick.WithSeed(1))
		var sent sync.WaitGroup
		for n := range 200 {
			if n%5 == 0 {
				bad := request(t, poison(n), 1)
				in := &pdflow.PickInput{Request: bad, Attempt: 1}
				for range 2 {
					x := mustPick(t, p, in)
					time.Sleep(time.Millisecond)
					o := ended(x, bad, false, 500)
					o.Orphan = orphans
					x.Done(o)
					in.Attempt, in.Avoid = 2, append(in.Avoid, x.Prefill.ID)
				}
			}
			good := request(t, fmt.Sprint("good ", n), 1)
			x := mustPick(t, p, &pdflow.PickInput{Request: good, Attempt: 1})
			prefills[x.Prefill.ID]++
			sent.Go(func() {
				time.Sleep(47 * time.Millisecond)
				x.Done(ended(x, good, true, 0))
			})
			time.Sleep(10 * time.Millisecond)
		}
		sent.Wait()
	})
	return prefills
}

// A body that every engine answers with an error says nothing of the engines. Did each get a cooldown for it, the one
// that the body has not met yet would get nearly all requests (179 of 200 here). The same holds for a client that
// changes its bad body each time, as long as the engines serve others in between.
func TestABodyThatEveryEngineFailsMovesNoLoad(t *testing.T) {
	for body, poison := range map[string]func(int) string{
		"same body": func(int) string { return "poison" },
		"new body":  func(n int) string { return fmt.Sprint("poison ", n) },
	} {
		for name, policy := range map[string]func() pick.Policy{
			"round-robin": pick.RoundRobin, "least-load": pick.LeastLoad, "two-choices": pick.TwoChoices,
		} {
			for _, orphans := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, orphans %t", body, name, orphans), func(t *testing.T) {
					prefills := under(t, policy(), poison, orphans)
					for _, id := range []string{"p0", "p1", "p2"} {
						require.InDelta(t, 200/3., prefills[id], 25, "%v", prefills)
					}
				})
			}
		}
	}
}

func TestAnEngineCoolsDownWhenASecondBodyFailsAtIt(t *testing.T) {
	const bad, unreachable, good = 500, 0, 200
	type ending struct {
		body   string
		status int
	}
	for name, c := range map[string]struct {
		endings []ending // of attempts at p0, one after another
		want    bool
	}{
		"one body":                      {[]ending{{"a", bad}}, false},
		"one body, often":               {[]ending{{"a", bad}, {"a", bad}, {"a", bad}}, false},
		"two bodies":                    {[]ending{{"a", bad}, {"b", bad}}, true},
		"two bodies, one of them often": {[]ending{{"a", bad}, {"a", bad}, {"b", bad}}, true},
		"it served between them":        {[]ending{{"a", bad}, {"c", good}, {"b", bad}}, false},
		"it was not reached":            {[]ending{{"a", unreachable}}, true},
		"one body, and not reached":     {[]ending{{"a", bad}, {"a", unreachable}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := pick.New(newFleet(t, many(2, 1)...).Set, pick.RoundRobin())
				for _, e := range c.endings {
					r := request(t, e.body, 1)
					x := mustPick(t, p, &pdflow.PickInput{Request: r, Avoid: []string{"p1"}})
					require.Equal(t, "p0", x.Prefill.ID)
					x.Done(ended(x, r, e.status == good, e.status))
				}
				cooled := func() bool {
					return pair(t, p, &pdflow.PickInput{})+pair(t, p, &pdflow.PickInput{}) == "p1+d0p1+d0"
				}
				require.Equal(t, c.want, cooled())
				time.Sleep(2 * time.Second) // the cooldown, and the time until the engine has its full share
				require.False(t, cooled(), "the cooldown does not end")
			})
		})
	}
}
