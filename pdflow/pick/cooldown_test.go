// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// Each orphan doubles the pair's cooldown up to cooldownMost; a good response sets it back to cooldownFirst.
func TestAPairsCooldownDoublesWithEachOrphanUntilItServes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cooldowns
		session := &connector.Session{Prefill: discovery.Endpoint{ID: "p"}, Decode: discovery.Endpoint{ID: "d"}}
		orphan := &pdflow.Outcome{Session: session, Orphan: true, Err: &pdflow.Error{Code: pdflow.CodeClientGone}}
		cooled := func() time.Duration {
			began := time.Now()
			for c.pair("p", "d", 0) == coolingDown {
				time.Sleep(10 * time.Millisecond)
			}
			return time.Since(began)
		}
		for _, want := range []time.Duration{cooldownFirst, 2 * cooldownFirst, 4 * cooldownFirst, cooldownMost,
			cooldownMost} {
			c.done(orphan)
			c.done(orphan) // a second failure during a cooldown is the same fault
			require.True(t, c.engine("p", 0) == good && c.engine("d", 0) == good, "each engine may serve with others")
			require.Equal(t, want, cooled())
		}
		c.done(
			&pdflow.Outcome{Session: session, Prefill: pdflow.LegOutcome{Endpoint: "p"},
				Decode: pdflow.LegOutcome{Endpoint: "d"}},
		)
		c.done(orphan)
		require.Equal(t, cooldownFirst, cooled())
	})
}

// An operator sees which engines and pairs have a cooldown, and for how long.
func TestCooldownsAreListedUntilTheyEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &picker{state: &state{}}
		session := &connector.Session{Prefill: discovery.Endpoint{ID: "p"}, Decode: discovery.Endpoint{ID: "d"}}
		p.cooldowns.done(&pdflow.Outcome{Session: session, Orphan: true,
			Err: &pdflow.Error{Code: pdflow.CodeClientGone}})
		p.cooldowns.done(&pdflow.Outcome{Err: &pdflow.Error{Code: pdflow.CodeDecodeFailed, Endpoint: "x"}})
		time.Sleep(cooldownFirst / 4)
		require.ElementsMatch(t, []Cooldown{{Engine: "p", Decode: "d", Left: cooldownFirst * 3 / 4},
			{Engine: "x", Left: cooldownFirst * 3 / 4}}, Cooldowns(p))
		time.Sleep(cooldownFirst)
		require.Empty(t, Cooldowns(p))
		require.Nil(t, Cooldowns(nil), "of another kind of picker nothing is known")
	})
}

// An engine that failed and left the set must not make every later pick take the lock: the next good response of any
// engine drops its entry.
func TestTheCooldownOfAnEngineThatLeftIsDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cooldowns
		c.done(&pdflow.Outcome{Err: &pdflow.Error{Code: pdflow.CodeDecodeFailed, Endpoint: "gone"}})
		require.Equal(t, coolingDown, c.engine("gone", 0))
		served := &pdflow.Outcome{Prefill: pdflow.LegOutcome{Endpoint: "p"}, Decode: pdflow.LegOutcome{Endpoint: "d"}}
		c.done(served)
		require.EqualValues(t, 1, c.n.Load(), "its next cooldown may be longer yet")
		time.Sleep(cooldownFirst + cooldownMost + time.Millisecond)
		c.done(served)
		require.Zero(t, c.n.Load())
	})
}

// After a cooldown it again takes two bodies to start the next one, which is longer; two bodies that failed far apart
// start none.
func TestEachCooldownOfAnEngineNeedsTwoBodies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c cooldowns
		fault := func(prompt string) bool {
			r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"`+prompt+`"}`))
			require.NoError(t, err)
			c.done(&pdflow.Outcome{Session: &connector.Session{Request: r},
				Err: &pdflow.Error{Code: pdflow.CodeTimeout, Leg: pdflow.LegDecode, Phase: "send", Endpoint: "d"}})
			return c.engine("d", 0) == coolingDown
		}
		require.False(t, fault("a"))
		require.True(t, fault("b"))
		time.Sleep(cooldownFirst)
		for range 3 {
			require.False(t, fault("b"), "one body keeps the engine on cooldown")
		}
		require.True(t, fault("a"))
		time.Sleep(2*cooldownFirst - time.Millisecond)
		require.Equal(t, coolingDown, c.engine("d", 0), "the second cooldown is no longer than the first")
		time.Sleep(time.Millisecond)
		require.NotEqual(t, coolingDown, c.engine("d", 0))
		require.False(t, fault("a"))
		time.Sleep(cooldownMost + time.Millisecond)
		require.False(t, fault("b"), "the fault before it is forgotten")
	})
}

// If decode engines time out one after another, and all of them got their KV from one prefill engine, that one is at
// fault: it alone gets a cooldown.
func TestSeveralDecodeEnginesThatTimeOutCoolTheirPrefillEngine(t *testing.T) {
	type end struct{ body, prefill, decode string }
	for name, c := range map[string]struct {
		ends []end // of attempts, in order; a body "" is a good response
		want []string
	}{
		"one P, two Ds, two bodies": {[]end{{"a", "p1", "d1"}, {"b", "p1", "d2"}}, []string{"p1"}},
		"one body":                  {[]end{{"a", "p1", "d1"}, {"a", "p1", "d2"}}, nil},
		"one D, so the pair":        {[]end{{"a", "p1", "d1"}, {"b", "p1", "d1"}}, []string{"p1+d1"}},
		"one D, two Ps":             {[]end{{"a", "p1", "d1"}, {"b", "p2", "d1"}}, []string{"d1"}},
		"two Ps":                    {[]end{{"a", "p1", "d1"}, {"b", "p2", "d2"}}, nil},
		"P served between them":     {[]end{{"a", "p1", "d1"}, {"", "p1", "d1"}, {"b", "p1", "d2"}}, nil},
		"D serves alone":            {[]end{{"a", "", "d1"}, {"b", "", "d2"}}, nil},
		"a D more": {[]end{{"a", "p1", "d1"}, {"a", "p1", "d2"}, {"b", "p1", "d1"}},
			[]string{"p1", "p1+d1"}},
	} {
		t.Run(name, func(t *testing.T) {
			var cs cooldowns
			for _, e := range c.ends {
				r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"`+e.body+`"}`))
				require.NoError(t, err)
				o := &pdflow.Outcome{Session: &connector.Session{Request: r, Prefill: discovery.Endpoint{ID: e.prefill},
					Decode: discovery.Endpoint{ID: e.decode}}, Prefill: pdflow.LegOutcome{Endpoint: e.prefill},
					Decode: pdflow.LegOutcome{Endpoint: e.decode}}
				if e.body != "" {
					o.Err = &pdflow.Error{Code: pdflow.CodeTimeout, Leg: pdflow.LegDecode, Phase: "send",
						Endpoint: e.decode}
				}
				cs.done(o)
			}
			var cooling []string
			for _, id := range []string{"p1", "p2", "d1", "d2"} {
				if cs.engine(id, 0) == coolingDown {
					cooling = append(cooling, id)
				}
			}
			if cs.pair("p1", "d1", 0) == coolingDown {
				cooling = append(cooling, "p1+d1")
			}
			require.Equal(t, c.want, cooling)
		})
	}
}
