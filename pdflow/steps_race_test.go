// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// Many goroutines call all methods of one request and of its steps, in any order: no data race, no panic, no call that
// hangs, and nothing is left. The race detector checks the first.
func TestStepsFromManyGoroutines(t *testing.T) {
	for name, order := range map[string]connector.Order{"serial": connector.PrefillThenDecode,
		"together": connector.Together} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{order: order}, answer(ok), answer(fromD),
				pdflow.WithRetry(config.Retry{MaxAttempts: 2, BackoffBase: time.Millisecond}))
			rt := &http.Transport{}
			t.Cleanup(rt.CloseIdleConnections)
			for range 30 {
				within(t, name, func() { hammer(t, x, rt) })
			}
			require.Empty(t, x.flow.Sessions())
		})
	}
}

func hammer(t *testing.T, x *scripted, rt http.RoundTripper) {
	t.Helper()
	s := begin(t, x.flow, `{"prompt":"hi"}`, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	var all sync.WaitGroup
	ask := func(step *pdflow.Step) {
		for range 3 {
			all.Go(func() {
				switch rand.N(7) {
				case 0:
					if r, err := step.Take(); err == nil {
						resp, err := rt.RoundTrip(r)
						step.Done(resp, err)
					}
				case 1:
					_ = step.Relay(200)
				case 2:
					step.Done(nil, errors.New("no"))
				case 3:
					step.Done(&http.Response{StatusCode: 500, Body: io.NopCloser(strings.NewReader("{}"))}, nil)
				case 4:
					_, _ = step.Relayable(), step.Context().Err()
				default:
					step.Send(rt)
				}
			})
		}
	}
	for range 4 {
		all.Go(func() {
			for range 4 {
				step, resp, err := s.Next(ctx)
				switch {
				case step != nil:
					ask(step)
				case err != nil:
					s.WriteError(httptest.NewRecorder(),
						httptest.NewRequest(http.MethodPost, "/v1/completions", http.NoBody), err)
				case resp.Body != nil:
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
			}
		})
	}
	for range 2 {
		all.Go(func() {
			time.Sleep(rand.N(20 * time.Millisecond))
			s.End(nil)
		})
	}
	all.Wait()
	s.End(nil)
}
