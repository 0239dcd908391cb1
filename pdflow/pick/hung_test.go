// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// late is an attempt of a request that ran out of time at a pair, after prefill had served or in prefill.
func late(t *testing.T, prompt, p, d string, leg pdflow.LegKind) *pdflow.Outcome {
	t.Helper()
	r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"`+prompt+`"}`))
	require.NoError(t, err)
	o := &pdflow.Outcome{Session: &connector.Session{Request: r, Prefill: discovery.Endpoint{ID: p},
		Decode: discovery.Endpoint{ID: d}}, Prefill: pdflow.LegOutcome{Endpoint: p},
		Err: &pdflow.Error{Code: pdflow.CodeTimeout, Leg: leg, Endpoint: p}}
	if leg == pdflow.LegDecode {
		o.Decode.Endpoint, o.Err.Endpoint, o.Err.Phase = d, d, "transfer"
	}
	return o
}

// fleetOf returns the cooldowns of a fleet of that many engines of each role, p0 … and d0 ….
func fleetOf(prefills, decodes int) *cooldowns {
	var snap discovery.Snapshot
	for i := range prefills {
		snap.Endpoints = append(snap.Endpoints, discovery.Endpoint{ID: fmt.Sprint("p", i), Role: discovery.RolePrefill,
			Phase: discovery.PhaseReady})
	}
	for i := range decodes {
		snap.Endpoints = append(snap.Endpoints, discovery.Endpoint{ID: fmt.Sprint("d", i), Role: discovery.RoleDecode,
			Phase: discovery.PhaseReady})
	}
	c := &cooldowns{}
	c.count(&snap)
	return c
}

// Somebody whose prompts, a new one each time, run out of time at every pair and every engine while nobody else is
// there leaves half of the pairs, which have a cooldown of 8 s at the most.
func TestCooldownsAfterTimeoutsTakeAtMostHalfOfThePairs(t *testing.T) {
	for _, leg := range []pdflow.LegKind{pdflow.LegPrefill, pdflow.LegDecode} {
		for _, size := range [][2]int{{1, 1}, {1, 2}, {2, 1}, {2, 2}, {3, 3}, {2, 5}} {
			synctest.Test(t, func(t *testing.T) {
				c := fleetOf(size[0], size[1])
				for round := range 5 {
					for i := range size[0] * size[1] {
						p, d := fmt.Sprint("p", i%size[0]), fmt.Sprint("d", i/size[0])
						c.done(late(t, fmt.Sprint(round, i, "a"), p, d, leg))
						c.done(late(t, fmt.Sprint(round, i, "b"), p, d, leg))
					}
					time.Sleep(time.Minute)
				}
				free := 0
				for i := range size[0] * size[1] {
					p, d := fmt.Sprint("p", i%size[0]), fmt.Sprint("d", i/size[0])
					if !c.m[cooldownKey{engine: p}].hung && !c.m[cooldownKey{engine: d}].hung &&
						!c.m[cooldownKey{p, d}].hung {
						free++
						require.False(t, time.Now().Before(c.m[cooldownKey{p, d}].until), "longer than 8 s")
					}
				}
				require.GreaterOrEqual(t, 2*free, size[0]*size[1], "%s of %v", leg, size)
			})
		}
	}
}

// Each cooldown after timeouts is twice as long as the one before, give or take a tenth, up to hungMost, and one
// request that runs out of time begins the next; one that is served ends them all. What began before says nothing.
func TestCooldownsAfterTimeoutsGrowToMinutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fleetOf(2, 2)
		long := late(t, "begun before", "p0", "d0", pdflow.LegDecode)
		long.Session.CreatedAt = time.Now()
		time.Sleep(time.Second)
		c.done(late(t, "a", "p0", "d0", pdflow.LegDecode))
		for i, want := range []time.Duration{8, 16, 32, 64, 128, 240, 240} {
			c.done(late(t, fmt.Sprint("b", i), "p0", "d0", pdflow.LegDecode))
			began := time.Now()
			for c.pair("p0", "d0", 0) == coolingDown {
				time.Sleep(10 * time.Millisecond)
			}
			require.InDelta(t, want*time.Second, time.Since(began), float64(want*time.Second)*0.101)
			c.done(long)
			require.Equal(t, good, c.pair("p0", "d0", 0), "it began before the cooldown")
		}
		old := &pdflow.Outcome{Prefill: pdflow.LegOutcome{Endpoint: "p0"},
			Decode: pdflow.LegOutcome{Endpoint: "d0", FirstByte: long.Session.CreatedAt}}
		c.done(old)
		require.True(t, c.m[cooldownKey{"p0", "d0"}].hung, "its own transfer was over before")
		old.Decode.FirstByte = time.Now()
		c.done(old)
		require.False(t, c.m[cooldownKey{"p0", "d0"}].hung)
		c.done(late(t, "c", "p0", "d0", pdflow.LegDecode))
		require.NotEqual(t, coolingDown, c.pair("p0", "d0", 0), "one body")
	})
}

// Where a pair has hung and its cooldown is over, the first of many picks tries it, and the others wait for its end.
func TestOnePickTriesWhatHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fleetOf(2, 2)
		c.done(late(t, "a", "p0", "d0", pdflow.LegDecode))
		c.done(late(t, "b", "p0", "d0", pdflow.LegDecode))
		release, ok := c.try("p0", "d0")
		require.True(t, ok && release == nil, "in the cooldown only if nothing else is there")
		time.Sleep(hungMost)
		release, ok = c.try("p0", "d0")
		require.True(t, ok)
		require.NotNil(t, release)
		require.Equal(t, coolingDown, c.pair("p0", "d0", 0))
		_, again := c.try("p0", "d0")
		require.False(t, again)
		release() // its client has left
		require.Equal(t, good, c.pair("p0", "d0", 0))
		c.probers.Add(1)
		require.Equal(t, coolingDown, c.pair("p0", "d0", 0), "a prober decides")
		c.restarted("d0")
		next, _, _, _ := c.next(time.Now())
		require.NotNil(t, next, "an engine that is ready again is probed at once")
	})
}

// A trial keeps others away for trialMost at the longest: a request that nobody ends must not hold a pair for ever.
func TestATrialHasALimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := fleetOf(2, 2)
		c.done(late(t, "a", "p0", "d0", pdflow.LegDecode))
		c.done(late(t, "b", "p0", "d0", pdflow.LegDecode))
		time.Sleep(hungMost)
		_, ok := c.try("p0", "d0") // it is never released
		require.True(t, ok)
		time.Sleep(trialMost - time.Second)
		require.Equal(t, coolingDown, c.pair("p0", "d0", 0))
		c.probers.Add(1)
		probe, _, _, _ := c.next(time.Now())
		require.Nil(t, probe, "a prober waits, too")
		c.probers.Add(-1)
		time.Sleep(time.Second)
		require.Equal(t, good, c.pair("p0", "d0", 0))
		release, ok := c.try("p0", "d0")
		require.True(t, ok && release != nil)
		_, again := c.try("p0", "d0")
		require.False(t, again, "one at a time")
	})
}

// A reload may change the connector while a pair waits for its probe. Then it is probed by the flows that are there,
// and not for ever by none.
func TestAPairIsProbedByTheFlowsThatAReloadHasLeft(t *testing.T) {
	for name, c := range map[string]struct {
		flows   int
		status  int
		refused bool
		served  bool
	}{
		"another connector serves":     {1, 200, false, true},
		"another connector is refused": {1, 401, true, false},
		"no flow":                      {0, 200, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				eps := endpoints("e", 1)
				own, publish := pickerOf(t, RoundRobin())
				publish(eps...)
				own.load()
				p := Prober{Picker: own}
				for range c.flows {
					flow, err := pdflow.New(named{"now"}, own, pdflow.WithTransport(says(c.status)))
					require.NoError(t, err)
					p.Flows = append(p.Flows, flow)
				}
				for _, prompt := range []string{"a", "b"} {
					o := late(t, prompt, eps[0].ID, eps[1].ID, pdflow.LegDecode)
					o.Connector = "before"
					own.cooldowns.done(o)
				}
				key := cooldownKey{eps[0].ID, eps[1].ID}
				require.NotNil(t, own.cooldowns.m[key].timedOut)
				p.try(t.Context(), own, own.cooldowns.m[key].timedOut)
				x := own.cooldowns.m[key]
				require.Equal(t, c.served, x.timedOut == nil)
				require.Equal(t, c.refused, x.timedOut != nil && x.timedOut.refused, "clients may try it")
			})
		})
	}
}

// says is engines that answer each leg with a status, and with a completion.
type says int

func (s says) RoundTrip(*http.Request) (*http.Response, error) {
	body := `{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}`
	return &http.Response{StatusCode: int(s), Header: http.Header{"Content-Type": {"application/json"}},
		ContentLength: int64(len(body)), Body: io.NopCloser(strings.NewReader(body))}, nil
}

func TestAProberNeedsAPickerOfNew(t *testing.T) {
	p := Prober{Picker: Func(nil)}
	require.Error(t, p.Run(t.Context()))
}
