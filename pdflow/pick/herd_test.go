// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// served plays gateways that send requests to four decode engines, one in each millisecond, each of which ends half a
// second later. They hear what say makes of an engine's requests of a lag ago. It returns the most that each engine has
// had at once.
func served(t *testing.T, policy pick.Policy, gateways int, lag time.Duration,
	say func(id string, at time.Time, requests int) inspect.Load) (peaks map[string]int) {
	t.Helper()
	const lasts, step = 500, time.Millisecond
	start := time.Unix(1000, 0)
	now := start
	had := map[string][]int{} // by engine, in each millisecond
	count := map[string]int{}
	load := func(id string) inspect.Load {
		i := int(now.Add(-lag).Sub(start) / step)
		if i < 0 || i >= len(had[id]) {
			return inspect.Load{}
		}
		return say(id, now.Add(-lag), had[id][i])
	}
	set := newFleet(t, many(1, 4)...).Set
	var pickers []pdflow.Picker
	for i := range gateways {
		pickers = append(pickers, pick.New(set, policy, pick.WithSeed(uint64(i)), pick.WithLoad(load),
			pick.WithNow(func() time.Time { return now })))
	}
	peaks = map[string]int{}
	type running struct {
		id   string
		done func(*pdflow.Outcome)
	}
	var all []running
	r := rand.New(rand.NewPCG(1, 1))
	for i := range 6000 {
		now = start.Add(time.Duration(i) * step)
		if i >= lasts {
			old := all[i-lasts]
			old.done(&pdflow.Outcome{})
			count[old.id]--
		}
		got, err := pickers[r.IntN(gateways)].Pick(context.Background(), &pdflow.PickInput{})
		require.NoError(t, err)
		got.PrefillDone(nil)
		all = append(all, running{got.Decode.ID, got.Done})
		count[got.Decode.ID]++
		for k := range 4 {
			id := fmt.Sprintf("d%d", k)
			had[id] = append(had[id], count[id])
			if i > 2000 {
				peaks[id] = max(peaks[id], count[id])
			}
		}
	}
	return peaks
}

func honest(_ string, at time.Time, n int) inspect.Load { return inspect.Load{At: at, Running: n} }

// Of 500 requests at once each engine has 125 if they are spread evenly.
const evenly = 125

func TestSeveralGatewaysDoNotHerd(t *testing.T) {
	for _, policy := range []pick.Policy{pick.LeastLoad(), pick.TwoChoices(), pick.PrefixAffinity()} {
		for _, lag := range []time.Duration{0, 100 * time.Millisecond, time.Second} {
			for id, peak := range served(t, policy, 4, lag, honest) {
				assert.Less(t, peak, evenly*13/10, "%v with a lag of %v: %s", policy, lag, id)
			}
		}
	}
}

// One engine says 0 for ever, has stopped at an old figure, or says nothing.
func TestAWrongFigureDrawsNoHerd(t *testing.T) {
	for name, wrong := range map[string]func(at time.Time) inspect.Load{
		"always 0":     func(at time.Time) inspect.Load { return inspect.Load{At: at} },
		"stopped at 5": func(at time.Time) inspect.Load { return inspect.Load{At: at, Running: 5} },
		"says nothing": func(time.Time) inspect.Load { return inspect.Load{} },
		"old, and 0":   func(time.Time) inspect.Load { return inspect.Load{At: time.Unix(1001, 0)} },
		"a clock that jumps": func(at time.Time) inspect.Load {
			return inspect.Load{At: at.Add(time.Duration(at.UnixMilli()%7-3) * time.Hour)}
		},
	} {
		for _, policy := range []pick.Policy{pick.LeastLoad(), pick.TwoChoices()} {
			peaks := served(t, policy, 4, 100*time.Millisecond, func(id string, at time.Time, n int) inspect.Load {
				if id == "d0" {
					return wrong(at)
				}
				return honest(id, at, n)
			})
			assert.Less(t, peaks["d0"], evenly*3/2, "%v, d0 %s: %v", policy, name, peaks)
		}
	}
}

// A decode engine that gets a request after its prefill has not counted it before.
func TestWhatStillPrefillsIsNotSubtracted(t *testing.T) {
	var w words
	protocol, err := nixl.New(nil)
	require.NoError(t, err)
	p := pick.New(newFleet(t, many(1, 2)...).Set, pick.LeastLoad(), pick.WithSeed(1), pick.WithLoad(w.of),
		pick.WithNow(w.clock)).
		Bind(protocol, connector.Serving{})
	_, _ = picks(t, p, 20) // ten each, all of which prefill
	w.say("d0", 10)        // of others
	w.say("d1", 0)
	shares, _ := picks(t, p, 10)
	assert.Equal(t, map[string]int{"d1": 10}, shares)
}
