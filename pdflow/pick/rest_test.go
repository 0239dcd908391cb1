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

// A pair rests twice as long with each orphan, up to a bound, until it has served.
func TestAnAnswerEndsTheGrowthOfAPairsRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r rests
		session := &connector.Session{Prefill: discovery.Endpoint{ID: "p"}, Decode: discovery.Endpoint{ID: "d"}}
		orphan := &pdflow.Outcome{Session: session, Orphan: true, Err: &pdflow.Error{Code: pdflow.CodeClientGone}}
		rested := func() time.Duration {
			began := time.Now()
			for r.pairResting("p", "d") {
				time.Sleep(10 * time.Millisecond)
			}
			return time.Since(began)
		}
		for _, want := range []time.Duration{restFirst, 2 * restFirst, 4 * restFirst, restMost, restMost} {
			r.done(orphan)
			r.done(orphan) // a burst is one fault
			require.False(t, r.resting("p") || r.resting("d"), "each is well with others")
			require.Equal(t, want, rested())
		}
		r.done(&pdflow.Outcome{Session: session, Prefill: pdflow.LegOutcome{Endpoint: "p"}, Decode: pdflow.LegOutcome{Endpoint: "d"}})
		r.done(orphan)
		require.Equal(t, restFirst, rested())
	})
}

// An engine that failed and left is no reason to look at rests with every pick from then on: the next answer of any other ends it.
func TestAnEngineThatIsGoneLeavesNothingBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r rests
		r.done(&pdflow.Outcome{Err: &pdflow.Error{Code: pdflow.CodeDecodeFailed, Endpoint: "gone"}})
		require.True(t, r.resting("gone"))
		served := &pdflow.Outcome{Prefill: pdflow.LegOutcome{Endpoint: "p"}, Decode: pdflow.LegOutcome{Endpoint: "d"}}
		r.done(served)
		require.EqualValues(t, 1, r.n.Load(), "it may rest longer yet")
		time.Sleep(restFirst + restMost + time.Millisecond)
		r.done(served)
		require.Zero(t, r.n.Load())
	})
}
