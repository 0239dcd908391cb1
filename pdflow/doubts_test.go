// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// refusesAll is a fleet of two prefill and two decode engines that answer 200 after 100 ms, but for one, which refuses
// all requests at once, and those that refuse what the client has got wrong.
type refusesAll struct {
	flow *pdflow.Flow
	mu   sync.Mutex
	legs map[string]int
	well bool
}

func newRefusesAll(t *testing.T, policy pick.Policy, sick string) *refusesAll {
	t.Helper()
	x := &refusesAll{legs: map[string]int{}}
	no := saysNo(400, `{"error":{"message":"template","type":"BadRequestError","code":400}}`)
	var eps []discovery.Endpoint
	for _, name := range []string{"p0", "p1", "d0", "d1"} {
		role := discovery.RolePrefill
		if name[0] == 'd' {
			role = discovery.RoleDecode
		}
		eps = append(eps, endpoint(t, "http://"+name, role))
	}
	var err error
	x.flow, err = pdflow.New(&fake{}, pick.New(setOf(t, eps...), policy, pick.WithSeed(1)), pdflow.WithoutPickWait(),
		pdflow.WithRetry(config.Retry{MaxAttempts: 1}),
		pdflow.WithTransport(roundTrips(func(r *http.Request) (*http.Response, error) {
			body, _ := io.ReadAll(r.Body)
			x.mu.Lock()
			x.legs[r.URL.Host]++
			well := x.well
			x.mu.Unlock()
			if r.URL.Host == sick && !well || strings.Contains(string(body), "wrong") {
				return no(r)
			}
			return after(100*time.Millisecond, replies(200))(r)
		})))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.flow.Shutdown(t.Context())) })
	return x
}

// send sends requests at a pace of 50 a second, and returns how many failed, and how many legs each engine got.
func (x *refusesAll) send(t *testing.T, n int, prompt string) (failed int, legs map[string]int) {
	t.Helper()
	var all sync.WaitGroup
	var mu sync.Mutex
	x.mu.Lock()
	clear(x.legs)
	x.mu.Unlock()
	for i := range n {
		all.Go(func() {
			resp, err := x.flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions, Body: fmt.Appendf(nil,
				`{"prompt":"%s %d"}`, prompt, i)})
			if err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
				return
			}
			mu.Lock()
			failed++
			mu.Unlock()
		})
		time.Sleep(20 * time.Millisecond)
	}
	all.Wait()
	return failed, x.legs
}

// An engine that answers probes well and refuses each request, as one whose chat template is missing, is idle, so that
// pickers that look at loads give it nearly all requests. After some refusals in a row another engine is asked, and if
// that serves, the refusals are the engine's fault.
func TestAnEngineThatRefusesEverythingIsNotBelieved(t *testing.T) {
	for _, policy := range []pick.Policy{pick.RoundRobin(), pick.LeastLoad()} {
		for _, sick := range []string{"p0", "d0"} {
			t.Run(policy.String()+" "+sick, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					x := newRefusesAll(t, policy, sick)
					failed, legs := x.send(t, 1000, "hi")
					t.Logf("%d of 1000 failed; legs %v", failed, legs)
					assert.LessOrEqual(t, failed, 8)
					assert.Less(t, legs[sick], 150, "it has cooldowns")
					x.mu.Lock()
					x.well = true
					x.mu.Unlock()
					time.Sleep(20 * time.Second)
					failed, legs = x.send(t, 200, "hi")
					assert.Zero(t, failed)
					assert.Greater(t, legs[sick], 50, "it serves again")
				})
			})
		}
	}
}

// What each engine refuses is the client's fault: few of such requests are asked twice, and no engine has a cooldown.
func TestWhatEveryEngineRefusesIsSeldomAskedTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newRefusesAll(t, pick.RoundRobin(), "")
		failed, legs := x.send(t, 400, "wrong")
		assert.Equal(t, 400, failed)
		assert.LessOrEqual(t, legs["p0"]+legs["p1"], 400*9/8+4, "%v", legs)
		failed, legs = x.send(t, 40, "hi")
		assert.Zero(t, failed)
		assert.Equal(t, 20, legs["p0"])
	})
}

// An engine that a request names is the only one that can be asked: however often it refuses, its word is the client's.
func TestTheRefusalsOfANamedEngineAreItsWord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &fake{}, "p0 p1 d0 d1", config.Retry{MaxAttempts: 2}, func(host string, _ int) response {
			if host == "d1" {
				return replies(400)
			}
			return replies(200)
		})
		for range 2*8 + 2 {
			require.Equal(t, string(pdflow.CodeDecodeRejected), f.doAs(&pdflow.Request{API: connector.APICompletions,
				Body: []byte(`{"prompt":"hi"}`), Decode: "d1"}))
		}
		for _, o := range f.seen.list() {
			require.Equal(t, "final", o.Retry)
			require.False(t, o.Err.EngineFault())
		}
		synctest.Wait()
	})
}
