// SPDX-License-Identifier: Apache-2.0

package admit_test

import (
	"context"
	"fmt"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/admit"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Nobody knows the pace of an engine that has not answered yet. So not more requests wait for it than keep it busy at
// any pace, and as many as that are not refused: they may be a burst.
func TestBeforeAnyPaceIsKnownFewRequestsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPicker(t, onePair(), &admit.Options{Adaptive: true})
		ctx, leave := context.WithCancel(t.Context())
		var refused int
		for range 200 {
			go func() {
				_, err := p.Pick(ctx, &pdflow.PickInput{Attempt: 1})
				if ctx.Err() == nil && err != nil {
					overloaded(t, err)
					refused++
				}
			}()
			synctest.Wait()
		}
		assert.Equal(t, 24, p.Queued())
		assert.Equal(t, 200-16-24, refused)
		assert.Zero(t, p.State().Refused["queue_full"])
		leave()
		synctest.Wait()
	})
}

// A client that is refused is told when those that wait now will have been served.
func TestRetryAfterIsWhenTheQueueWillBeServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPicker(t, onePair(), &admit.Options{PrefillLimit: 1, QueueTimeout: 20 * time.Second, Queue: 4})
		x := pickOf(t, p)
		picks := make(chan pdflow.Pick, 20)
		arrive := func() {
			go func() {
				x, err := p.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
				if assert.NoError(t, err) {
					picks <- x
				}
			}()
			synctest.Wait()
		}
		for range 3 { // one in 3 s
			arrive()
			time.Sleep(3 * time.Second)
			x.Done(&pdflow.Outcome{})
			x = <-picks
		}
		for range 4 {
			arrive()
		}
		_, err := p.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
		var e *pdflow.Error
		require.ErrorAs(t, err, &e)
		assert.Equal(t, 12*time.Second, e.RetryAfter)
		for range 4 {
			x.Done(&pdflow.Outcome{})
			x = <-picks
		}
	})
}

// An engine that fails at once has room at any time. In an overload it must not get what the others have no room for:
// while it has a cooldown, requests wait for them.
func TestInAnOverloadADeadEngineDoesNotGetTheRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var engines []discovery.Endpoint
		for _, id := range []string{"p1", "p2", "d"} {
			role := discovery.RolePrefill
			if id == "d" {
				role = discovery.RoleDecode
			}
			engines = append(engines,
				discovery.Endpoint{ID: id, URL: &url.URL{Scheme: "http", Host: id}, Role: role})
		}
		set, err := static.NewSet(engines...)
		require.NoError(t, err)
		p, err := admit.New(pick.New(set, pick.RoundRobin()).Bind(nil, connector.Serving{}),
			&admit.Options{PrefillLimit: 2})
		require.NoError(t, err)
		defer p.Close()

		var held []pdflow.Pick
		dead := 0
		for i := range 20 {
			go func() {
				r, err := connector.ParseRequest(connector.APICompletions,
					fmt.Appendf(nil, `{"model":"m","prompt":"%d"}`, i))
				assert.NoError(t, err)
				x, err := p.Pick(t.Context(), &pdflow.PickInput{Attempt: 1, Request: r})
				if err != nil {
					return
				}
				if x.Prefill.ID != "p1" {
					held = append(held, x)
					return
				}
				dead++
				e := &pdflow.Error{Code: pdflow.CodePrefillFailed, Leg: pdflow.LegPrefill, Endpoint: "p1"}
				x.PrefillDone(&pdflow.LegOutcome{Endpoint: "p1", Err: e})
				x.Done(&pdflow.Outcome{Err: e, Prefill: pdflow.LegOutcome{Endpoint: "p1", Err: e},
					Session: &connector.Session{Request: r}})
			}()
			synctest.Wait()
		}
		assert.LessOrEqual(t, dead, 3, "after its first faults it has a cooldown")
		assert.Len(t, held, 2)
		assert.GreaterOrEqual(t, p.Queued(), 15, "the others wait for the engine that is well")
	})
}
