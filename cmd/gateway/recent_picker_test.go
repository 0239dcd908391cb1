// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow"
)

// unhealthy starts a gateway whose engines of a role fail their health probes.
func unhealthy(t *testing.T, spec string, prefill, decode bool) *program {
	t.Helper()
	p, d := newEngine(t), newEngine(t)
	p.set(func(e *engine) { e.sick = prefill })
	d.set(func(e *engine) { e.sick = decode })
	g := start(t, gatewayYAML("")+pairYAML("m", p, d, spec))
	eventually(t, func() bool {
		s, _ := g.live()
		e := s.Models[0].Endpoints
		return len(e) == 2 && e[0].Healthy != prefill && e[1].Healthy != decode
	})
	return g
}

// While no engine is there each request is in the view once, whether it waits to the end or its client leaves.
func TestTheLiveViewOfAnOutage(t *testing.T) {
	t.Parallel()
	begin := time.Now()
	g := unhealthy(t, "", true, true)
	state, _ := g.live()
	for _, e := range state.Models[0].Endpoints {
		require.NotNil(t, e.IllSince)
		assert.WithinRange(t, *e.IllSince, begin, time.Now())
	}
	for i := range 3 {
		status, _, body := g.complete(`{"model":"m","prompt":"a"}`, "X-Request-Id", fmt.Sprint("waits-", i))
		require.Equal(t, http.StatusServiceUnavailable, status, body)
	}
	s, _ := g.live()
	require.Len(t, s.Requests, 3)
	assert.Equal(t, map[string]int64{"no_endpoint": 3}, s.Models[0].Totals.Errors)
	for i, r := range s.Requests {
		assert.Equal(t, fmt.Sprint("waits-", 2-i), r.RequestID)
		assert.Equal(t, "m", r.Model)
		assert.Equal(t, 1, r.Attempt)
		assert.Equal(t, "no_endpoint", r.Error)
		assert.Equal(t, "pick", r.Failing)
		assert.Greater(t, r.End, 200., "all of it was the queue")
		assert.Nil(t, r.Picked)
	}
	for sent := 4; s.Models[0].Totals.Errors["client_gone"] == 0; sent++ { // one that is too late gets its 503
		require.Less(t, sent, 50)
		ctx, leave := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			liveRequest(ctx, g, `{"model":"m","prompt":"a"}`)
		}()
		assert.Eventually(t, func() bool { // it has come to the gateway
			s, _ = g.live()
			return len(s.Requests) == sent
		}, 20*time.Second, time.Millisecond)
		leave()
		<-ended
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			s, _ = g.live()
			assert.Len(c, s.Requests, sent)
			assert.EqualValues(c, sent, errorsOf(s.Models[0].Totals))
		}, 20*time.Second, 10*time.Millisecond)
	}
}

// A request that falls back because there is no prefill engine is served, and nothing else.
func TestTheLiveViewOfAFallback(t *testing.T) {
	t.Parallel()
	g := unhealthy(t, "  kvConnector: {type: http, fallback: decode}\n", true, false)
	status, _, body := g.complete(`{"model":"m","prompt":"a"}`)
	require.Equal(t, http.StatusOK, status, body)
	var s liveState
	eventually(t, func() bool { // for a moment it is in flight and ended
		s, _ = g.live()
		return s.Models[0].Totals.Served == 1 && len(s.Requests) == 1 && !s.Requests[0].Running
	})
	assert.Empty(t, s.Models[0].Totals.Errors)
	assert.Equal(t, "fallback", s.Requests[0].Mode)
	assert.Greater(t, *s.Requests[0].Picked, 200., "the wait for a pair is its queue")
}

// A client that leaves the queue of admission is in the view, too.
func TestTheLiveViewOfAClientThatLeavesTheQueue(t *testing.T) {
	g := queueing(t, 20)
	var clients sync.WaitGroup
	defer clients.Wait()
	first, stop := context.WithCancel(t.Context())
	defer stop()
	clients.Go(func() {
		liveRequest(first, g, `{"model":"tiny","prompt":"`+strings.Repeat("word ", 400)+`","max_tokens":1}`)
	})
	eventually(t, func() bool { s, _ := g.live(); return s.Models[0].Phases["prefill"] == 1 })
	second, leave := context.WithCancel(t.Context())
	defer leave()
	clients.Go(func() { liveRequest(second, g, `{"model":"tiny","prompt":"a","max_tokens":1}`) })
	eventually(t, func() bool { s, _ := g.live(); return s.Models[0].Admission.Queued == 1 })
	leave()
	var s liveState
	eventually(t, func() bool { // for a moment it is in flight and ended
		s, _ = g.live()
		return len(s.Models[0].Totals.Errors) > 0 && len(s.Requests) == 2 && !s.Requests[1].Running
	})
	assert.Equal(t, map[string]int64{"client_gone": 1}, s.Models[0].Totals.Errors)
	assert.Equal(t, "client_gone", s.Requests[1].Error)
	assert.Nil(t, s.Requests[1].Picked)
}

// What a request met at its pickers tells whether it has a timeline of its own wait when it fails.
func TestTheRecentRequestsThatGotNoEngines(t *testing.T) {
	noEndpoint := &pdflow.Error{Code: pdflow.CodeNoEndpoint, Phase: "pick"}
	overloaded := &pdflow.Error{Code: pdflow.CodeOverloaded, Phase: "pick"}
	full := &pdflow.Error{Code: pdflow.CodeOverloaded, Phase: "pick", Leg: pdflow.LegPrefill} // of an attempt
	broken := &pdflow.Error{Code: pdflow.CodeDecodeFailed, Phase: "response"}
	for name, c := range map[string]struct {
		met  string // a digit: asks for that attempt; p: got engines; s: the attempt is shown
		err  *pdflow.Error
		want int // the attempt of the row; 0: no row
	}{
		"no model was asked":                           {"", noEndpoint, 0},
		"it waited, asking again":                      {"111", noEndpoint, 1},
		"and for a fallback besides":                   {"114", noEndpoint, 1},
		"it left with engines that it did not use":     {"1p", noEndpoint, 1},
		"its only attempt failed":                      {"1ps", broken, 0},
		"there was no pair for a second":               {"1ps22", broken, 0},
		"the same, and the first's engine had no room": {"1ps22", full, 0},
		"a second was refused":                         {"1ps2", overloaded, 2},
		"there was no pair to hedge with":              {"1p11s", broken, 0},
		"the same, and a second was refused":           {"1p1s2", overloaded, 2},
	} {
		t.Run(name, func(t *testing.T) {
			r, request := newRecent("m", slog.New(slog.DiscardHandler)), &picking{}
			ctx := context.WithValue(t.Context(), pickingKey{}, request)
			for _, step := range c.met {
				switch step {
				case 'p':
					request.picked()
				case 's':
					request.attempted(outcomeOf(1, pdflow.CodeDecodeFailed))
				default:
					pickingOf(ctx).asks(r, &pdflow.PickInput{RequestID: "x", Attempt: int(step - '0')})
				}
			}
			failed(ctx, c.err)
			failed(t.Context(), c.err) // of a request that is no client's
			all, totals := r.list()
			if c.want == 0 {
				assert.Empty(t, all)
				assert.Empty(t, totals.Errors)
				return
			}
			require.Len(t, all, 1)
			assert.Equal(t, c.want, all[0].Attempt)
			assert.Equal(t, "x", all[0].RequestID)
			assert.Equal(t, map[string]int64{string(c.err.Code): 1}, totals.Errors)
		})
	}
}
