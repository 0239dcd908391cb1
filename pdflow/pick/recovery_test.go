// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// load is requests with bodies of their own, one each millisecond, which end as fate says before the next one.
type load struct {
	t        *testing.T
	picker   pdflow.Picker
	fate     func(x pdflow.Pick, r *connector.ClientRequest) *pdflow.Outcome // nil: all are served
	requests int
}

// send sends for that long and returns how often each engine and pair was picked.
func (l *load) send(long time.Duration) map[string]int {
	l.t.Helper()
	got := map[string]int{}
	for end := time.Now().Add(long); time.Now().Before(end); time.Sleep(time.Millisecond) {
		l.requests++
		r := request(l.t, fmt.Sprint("prompt ", l.requests), 1)
		x := mustPick(l.t, l.picker, &pdflow.PickInput{Request: r, Attempt: 1})
		got[x.Prefill.ID]++
		got[x.Decode.ID]++
		got[x.Prefill.ID+"+"+x.Decode.ID]++
		o := ended(x, r, true, 0)
		if l.fate != nil {
			o = l.fate(x, r)
		}
		x.Done(o)
	}
	return got
}

// decodeFailed is how a request ends that decode answers with the status after prefill has served; 0: it ran out of
// time.
func decodeFailed(x pdflow.Pick, r *connector.ClientRequest, status int) *pdflow.Outcome {
	o := ended(x, r, true, 0)
	o.Prefill.Status, o.Decode.Status = 200, status
	o.Err = &pdflow.Error{Code: pdflow.CodeDecodeFailed, Leg: pdflow.LegDecode, Phase: "response",
		Endpoint: x.Decode.ID, Status: status}
	if status == 0 {
		o.Err.Code, o.Err.Phase = pdflow.CodeTimeout, "send"
	}
	return o
}

// A pair between which KV cannot go, such as one whose NIXL handshake fails, gets a cooldown; its engines go on with
// others.
func TestAPairThatFailsGetsACooldownAndNotItsEngines(t *testing.T) {
	for name, status := range map[string]int{"decode answers 500": 500, "decode answers garbage": 200,
		"decode runs out of time": 0} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &load{t: t, picker: pick.New(newFleet(t, many(2, 2)...).Set, pick.Random(), pick.WithSeed(1))}
				l.fate = func(x pdflow.Pick, r *connector.ClientRequest) *pdflow.Outcome {
					if x.Prefill.ID == "p0" && x.Decode.ID == "d0" {
						return decodeFailed(x, r, status)
					}
					return ended(x, r, true, 0)
				}
				got := l.send(10 * time.Second)
				require.Less(t, got["p0+d0"], 10000/4/10, "%v", got)
				for _, id := range []string{"p0", "p1", "d0", "d1"} {
					require.Greater(t, got[id], 2000, "%v", got)
				}
			})
		})
	}
}

// An engine that fails with several partners is at fault itself: a decode engine that loads no KV, or a prefill engine
// whose KV no decode engine can load.
func TestAnEngineThatFailsWithEveryPartnerGetsACooldown(t *testing.T) {
	for _, bad := range []string{"p0", "d0"} {
		synctest.Test(t, func(t *testing.T) {
			l := &load{t: t, picker: pick.New(newFleet(t, many(3, 3)...).Set, pick.Random(), pick.WithSeed(1))}
			l.fate = func(x pdflow.Pick, r *connector.ClientRequest) *pdflow.Outcome {
				if x.Prefill.ID == bad || x.Decode.ID == bad {
					return decodeFailed(x, r, 500)
				}
				return ended(x, r, true, 0)
			}
			l.send(time.Second)
			got := l.send(10 * time.Second)
			require.Less(t, got[bad], 10000/3/10, "%v", got)
			for _, id := range []string{"p0", "p1", "p2", "d0", "d1", "d2"} {
				if id != bad {
					require.Greater(t, got[id], 2000, "%v", got)
				}
			}
		})
	}
}

// After a cooldown an engine gets a tenth of its share, then more and more. That ends by itself, also if the picker
// never hears how a request ended, or no request comes.
func TestAnEngineRecoversLittleByLittle(t *testing.T) {
	for name, untold := range map[string]bool{"it serves": false, "nothing is heard of its requests": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &load{t: t, picker: pick.New(newFleet(t, many(2, 1)...).Set, pick.RoundRobin(), pick.WithSeed(1))}
				x := mustPick(t, l.picker, &pdflow.PickInput{Avoid: []string{"p1"}})
				require.Equal(t, "p0", x.Prefill.ID)
				x.Done(ended(x, request(t, "x", 1), false, 0))
				l.fate = func(x pdflow.Pick, r *connector.ClientRequest) *pdflow.Outcome {
					o := ended(x, r, true, 0)
					if untold { // clients leave
						o.Err = &pdflow.Error{Code: pdflow.CodeClientGone}
					}
					return o
				}
				require.Zero(t, l.send(time.Second)["p0"], "it has a cooldown")
				first := l.send(100 * time.Millisecond)["p0"]
				require.Positive(t, first, "a probe comes through")
				require.Less(t, first, 20, "of 50")
				l.send(400 * time.Millisecond)
				require.InDelta(t, 75, l.send(200 * time.Millisecond)["p0"], 25, "of 100")
				l.send(300 * time.Millisecond)
				require.InDelta(t, 500, l.send(time.Second)["p0"], 10)
			})
		})
	}
}

func TestAnEngineThatIsReadyAgainGetsItsShareLittleByLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eps := many(2, 1)
		f := newFleet(t, eps...)
		l := &load{t: t, picker: pick.New(f.Set, pick.LeastLoad(), pick.WithSeed(1))}
		require.InDelta(t, 500, l.send(time.Second)["p0"], 50, "a new engine has its share at once")
		down := many(2, 1)
		down[0].Phase = discovery.PhaseNotReady
		f.replace(down...)
		require.Zero(t, l.send(time.Second)["p0"])
		f.replace(eps...)
		first := l.send(time.Second)["p0"]
		require.Positive(t, first)
		require.Less(t, first, 300, "least load would give it all until it had served as many")
		l.send(7 * time.Second)
		require.Greater(t, l.send(time.Second)["p0"], 450)
	})
}

// While one engine is in a cooldown and another recovers, requests go to the one that recovers.
func TestAnEngineThatRecoversIsPreferredToOneInACooldown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eps := many(2, 1)
		f := newFleet(t, eps...)
		l := &load{t: t, picker: pick.New(f.Set, pick.RoundRobin(), pick.WithSeed(1))}
		down := many(2, 1)
		down[1].Phase = discovery.PhaseNotReady
		f.replace(down...)
		l.send(10 * time.Millisecond)
		f.replace(eps...)
		x := mustPick(t, l.picker, &pdflow.PickInput{Avoid: []string{"p1"}})
		x.Done(ended(x, request(t, "x", 1), false, 0))
		got := l.send(900 * time.Millisecond)
		require.Equal(t, 900, got["p1"], "%v", got)
	})
}

// 429 and 503 lower an engine's share; it goes on serving what it can, and the others do not get all of its load.
func TestAnEngineThatHasTooMuchToDoGetsLessForAWhile(t *testing.T) {
	for _, status := range []int{429, 503} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &load{t: t, picker: pick.New(newFleet(t, many(2, 1)...).Set, pick.RoundRobin(), pick.WithSeed(1))}
				n, busy := 0, true
				l.fate = func(x pdflow.Pick, r *connector.ClientRequest) *pdflow.Outcome {
					if n++; x.Prefill.ID != "p0" || !busy || n%4 == 0 {
						return ended(x, r, true, 0)
					}
					o := ended(x, r, false, status)
					if status == 429 {
						o.Err.Code = pdflow.CodePrefillRejected
					}
					return o
				}
				l.send(4 * time.Second)
				got := l.send(4 * time.Second)
				require.Less(t, got["p0"], 2000/3, "%v", got)
				require.Greater(t, got["p0"], 2000/32, "%v", got)
				busy = false
				l.send(9 * time.Second)
				require.InDelta(t, 500, l.send(time.Second)["p0"], 10)
			})
		})
	}
}

// One body that draws 503 from every engine moves no load.
func TestOneBodyLowersNoEnginesShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &load{t: t, picker: pick.New(newFleet(t, many(2, 1)...).Set, pick.RoundRobin(), pick.WithSeed(1))}
		poison, n := request(t, "poison", 1), 0
		l.fate = func(x pdflow.Pick, r *connector.ClientRequest) *pdflow.Outcome {
			if n++; n%3 == 0 && x.Prefill.ID == "p0" {
				return ended(x, poison, false, 503)
			}
			return ended(x, r, true, 0)
		}
		require.InDelta(t, 2000, l.send(4 * time.Second)["p0"], 10)
	})
}

// Both engines of a pair are looked at before either is chosen: with a policy that chooses prefill first, too, no
// prefill engine is chosen whose every decode engine has a cooldown.
func TestNoEngineIsChosenWhosePartnersAllHaveACooldown(t *testing.T) {
	for _, policy := range []pick.Policy{pick.RoundRobin(), pick.PrefixAffinity(), pick.LeastLoad()} {
		for _, bad := range []string{"pa", "da"} {
			synctest.Test(t, func(t *testing.T) {
				eps := []discovery.Endpoint{ep("pa", prefill), ep("pb", prefill), ep("da", decode), ep("db", decode)}
				for i := range eps {
					eps[i].Group = eps[i].ID[1:]
				}
				p := pick.New(newFleet(t, eps...).Set, policy, pick.WithSeed(1))
				r := request(t, "x", 1)
				x := mustPick(t, p, &pdflow.PickInput{Request: r, Avoid: []string{"pb"}})
				o := ended(x, r, false, 0)
				o.Err.Endpoint = bad
				x.Done(o)
				for range 100 {
					require.Equal(t, "pb+db", pair(t, p, &pdflow.PickInput{Request: r}), policy.String())
				}
			})
		}
	}
}
