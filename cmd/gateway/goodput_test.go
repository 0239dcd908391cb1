// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/sharedtest"
	"github.com/pdkit/pdkit/pdflow"
)

// Each second of a case is how many requests are served, run out of time, and are left by their clients after 4 s.
func TestGoodputThatCollapsesIsTold(t *testing.T) {
	// early: clients that leave soon after a late first byte; readers: those that leave a stream that began in time
	type second struct{ served, timeouts, left, refused, early, readers int }
	over := func(s second, seconds int) []second {
		all := make([]second, seconds)
		for i := range all {
			all[i] = s
		}
		return all
	}
	for name, c := range map[string]struct {
		seconds []second
		low     bool
		lines   int
	}{
		"all are served":               {over(second{served: 80}, 30), false, 0},
		"one in ten is late":           {over(second{served: 80, timeouts: 8}, 30), false, 0},
		"as at 1.2 times the capacity": {over(second{served: 66, timeouts: 24}, 30), true, 1},
		"as at 3 times":                {over(second{served: 15, timeouts: 190}, 30), true, 1},
		"none is served":               {over(second{timeouts: 210}, 30), true, 1},
		"clients give up":              {over(second{served: 10, left: 100}, 30), true, 1},
		"clients give up, once served": {over(second{served: 10, early: 100}, 30), true, 1},
		"clients have read enough":     {over(second{served: 10, readers: 100}, 30), false, 0},
		"clients' own faults":          {over(second{served: 10, refused: 100}, 30), false, 0},
		"a handful":                    {over(second{timeouts: 1}, 15), false, 0},
		"for minutes":                  {over(second{timeouts: 20}, 150), true, 3},
		"and is over": {append(over(second{timeouts: 20}, 30), over(second{served: 80}, 20)...), false,
			1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				log := &sharedtest.Log{}
				g := &goodput{log: slog.New(slog.NewTextHandler(log, nil)), model: "m"}
				add := func(n int, e *pdflow.Error, read ...time.Duration) {
					for range n {
						o := &pdflow.Outcome{Err: e,
							Session: &connector.Session{CreatedAt: time.Now().Add(-4 * time.Second)}}
						for _, d := range read {
							o.Decode.FirstByte = time.Now().Add(-d)
						}
						g.add(o, time.Now())
					}
				}
				for _, s := range c.seconds {
					add(s.served, nil)
					add(s.timeouts, &pdflow.Error{Code: pdflow.CodeTimeout})
					add(s.left, &pdflow.Error{Code: pdflow.CodeClientGone})
					add(s.early, &pdflow.Error{Code: pdflow.CodeClientGone}, time.Second)
					add(s.readers, &pdflow.Error{Code: pdflow.CodeClientGone}, 3*time.Second)
					add(s.refused, &pdflow.Error{Code: pdflow.CodePrefillRejected})
					time.Sleep(time.Second)
				}
				assert.Equal(t, c.low, g.collapses(time.Now()))
				assert.Equal(t, c.lines, strings.Count(log.String(), "goodput collapses: admission is off"), log)
				assert.Equal(t, c.lines > 0 && !c.low, strings.Contains(log.String(), "goodput has recovered"))
				time.Sleep(time.Minute)
				assert.False(t, g.collapses(time.Now()), "nothing comes any more")
			})
		})
	}
}

// A gateway whose requests time out says so if its model has no admission, and only then.
func TestAGatewayInOverloadSaysThatAdmissionIsOff(t *testing.T) {
	for admission, off := range map[string]bool{"": true, "  admission: {mode: adaptive}\n": false} {
		slow := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPost {
				_, _ = io.Copy(io.Discard, r.Body)
				<-r.Context().Done()
			}
		}))
		t.Cleanup(slow.Close)
		g := start(t, gatewayYAML("")+pairYAML("m", &engine{Server: slow}, newEngine(t, "m"),
			"  kvConnector: {timeouts: {prefill: 100ms}}\n"+admission))
		var all sync.WaitGroup
		for range 30 {
			all.Go(func() { do(t, http.MethodPost, g.client+"/v1/completions", `{"model":"m","prompt":"a"}`) })
		}
		all.Wait()
		require.Eventually(t, func() bool { // its second is over
			do(t, http.MethodPost, g.client+"/v1/completions", `{"model":"m","prompt":"a"}`)
			return !off || strings.Contains(g.log.String(), "goodput collapses: admission is off")
		}, 20*time.Second, 100*time.Millisecond)
		_, _, metrics := do(t, http.MethodGet, g.admin+"/metrics", "")
		assert.Equal(t, off, strings.Contains(metrics, `pd_goodput_collapsing{gen_ai_request_model="m"} 1`), metrics)
	}
}
