// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// storing is a connector that moves KV through a store, or offers it for a lease; with fromDecode P reads an earlier
// D's blocks.
type storing struct {
	fake
	lease      time.Duration
	fromDecode bool
}

func (s *storing) Traits() connector.Traits {
	t := s.fake.Traits()
	t.Handoff.ContentStore, t.Handoff.Lease = s.lease == 0, s.lease
	t.Handoff.FromDecode = s.fromDecode
	if s.fromDecode {
		t.Handoff.Member = "x"
	}
	return t
}

func TestASecondPrefillRunsBesideASlowOne(t *testing.T) {
	slow, quick, bad := after(5*time.Second, replies(200)), after(time.Second, replies(200)), replies(500)
	for name, c := range map[string]struct {
		p0, p1, p2, d0 response
		conn           connector.KVConnector
		engines        string
		retry          config.Retry
		want           string // legs, seconds, code, and the reason of each attempt that failed
		told           string // of pd.hedges
	}{
		"the second is first": {p0: slow, p1: quick, want: "p0,p1,d0 3s; hedge", told: "won"},
		"the first is first": {p0: after(3*time.Second, replies(200)), p1: slow,
			want: "p0,p1,d0 3s; hedge", told: "lost"},
		"the first answers in time": {p0: quick, p1: quick, want: "p0,d0 1s; "},
		"the first fails, later": {p0: after(3*time.Second, bad), p1: after(2*time.Second, replies(200)),
			want: "p0,p1,d0 4s; hedge", told: "won"},
		"the second fails": {p0: after(3*time.Second, replies(200)), p1: bad, want: "p0,p1,d0 3s; hedge",
			told: "lost"},
		"the first fails at once": {p0: bad, p1: quick, want: "p0,p1,d0 1s; failed"},
		"both fail, a third serves": {p0: after(3*time.Second, bad), p1: after(2*time.Second, bad), p2: quick,
			engines: "p0 p1 p2 d0", want: "p0,p1,p2,d0 5s; hedge, failed", told: "won"},
		"no other prefill engine is there": {p0: slow, engines: "p0 d0", want: "p0,d0 5s; ", told: "no_pair"},
		"both run out of time": {p0: hangs, p1: hangs, retry: config.Retry{MaxAttempts: 1},
			want: "p0,p1 12s timeout; hedge, attempts", told: "won"},
		"decode may wait for prefill": {p0: slow, p1: quick, d0: slow, conn: &fake{order: connector.Together},
			want: "d0,p0 5s; "},
		"a short lease": {p0: slow, p1: quick, conn: &storing{lease: 30 * time.Second},
			want: "p0,p1,d0 3s; hedge", told: "won"},
		"a long lease": {p0: slow, p1: quick, conn: &storing{lease: 480 * time.Second},
			want: "p0,d0 5s; "},
		"nobody knows where the KV is": {p0: slow, p1: quick, conn: &fake{}, want: "p0,d0 5s; "},
		"prefill reads decode's blocks": {p0: slow, p1: quick, conn: &storing{fromDecode: true},
			want: "p0,d0 5s; "},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if c.conn == nil {
					c.conn = &storing{}
				}
				if c.engines == "" {
					c.engines = "p0 p1 d0"
				}
				c.retry.Hedge, c.retry.BackoffBase = 2*time.Second, config.None
				f := newFakeFleet(t, c.conn, c.engines, c.retry, func(host string, _ int) response {
					if r := map[string]response{"p0": c.p0, "p1": c.p1, "p2": c.p2, "d0": c.d0}[host]; r != nil {
						return r
					}
					return replies(200)
				})
				began := time.Now()
				err := f.do(`{"prompt":"hi"}`)
				hosts := strings.Fields(f.hosts())
				if c.conn.Traits().Order == connector.Together {
					hosts = []string{"d0", "p0"}
					require.Len(t, f.sent(), 2)
				}
				got := fmt.Sprintf("%s %.0fs", strings.Join(hosts, ","), time.Since(began).Seconds())
				if err != nil {
					got += " " + string(codeOf(err))
				}
				synctest.Wait()
				var reasons []string
				finals := 0
				for _, o := range f.seen.list() {
					if o.Err != nil {
						reasons = append(reasons, o.Retry)
					}
					if o.Final {
						finals++
					}
				}
				require.Equal(t, c.want, got+"; "+strings.Join(reasons, ", "))
				require.Equal(t, 1, finals, "one attempt decides")
				for _, result := range []string{"won", "lost", "no_pair", "budget"} {
					n := 0
					if result == c.told {
						n = 1
						require.Contains(t, f.spans.events, "pd.request>pd.hedge pd.reason="+result)
					}
					require.Equal(t, n, f.told.why("pd.hedges", "", result), result)
				}
			})
		})
	}
}

// A picker is told what the second prefill is, which is of no use at one engine alone.
func TestTheSecondPrefillIsPickedAsOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inner := pick.New(setOf(t, endpoint(t, "http://p0", discovery.RolePrefill),
			endpoint(t, "http://p1", discovery.RolePrefill), endpoint(t, "http://d0", discovery.RoleDecode)),
			pick.RoundRobin(), pick.WithSeed(1))
		var pairs []bool
		told := func(ctx context.Context, inner pdflow.Picker, in *pdflow.PickInput) (pdflow.Pick, error) {
			pairs = append(pairs, in.Pair)
			return inner.Pick(ctx, in)
		}
		f := &fakeFleet{n: map[string]int{}, answer: func(host string, _ int) response {
			return after(2*time.Second, replies(map[bool]int{true: 200, false: 500}[host == "d0"]))
		}}
		var err error
		f.flow, err = pdflow.New(&storing{}, around{inner, told}, pdflow.WithTransport(f),
			pdflow.WithRetry(config.Retry{Hedge: time.Second, MaxAttempts: 2}))
		require.NoError(t, err)
		require.Error(t, f.do(`{"prompt":"hi"}`))
		require.Equal(t, []bool{false, true, false, true}, pairs)
		require.NoError(t, f.flow.Shutdown(t.Context()))
	})
}

// The loser is cancelled once the winner's prefill has served, and not only when decode has.
func TestTheSlowerPrefillIsCancelledBeforeDecodeServes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var cancelled time.Duration
		f := newFakeFleet(t, &storing{}, "p0 p1 d0", config.Retry{Hedge: time.Second}, func(
			host string, _ int) response {
			switch host {
			case "p0":
				return func(r *http.Request) (*http.Response, error) {
					<-r.Context().Done()
					cancelled = time.Since(began)
					return nil, r.Context().Err()
				}
			case "d0":
				return after(5*time.Second, replies(200))
			}
			return after(time.Second, replies(200))
		})
		require.NoError(t, f.do(`{"prompt":"hi"}`))
		require.Equal(t, 2*time.Second, cancelled)
		require.Equal(t, 7*time.Second, time.Since(began))
	})
}

// A client that leaves ends both prefills.
func TestAClientThatLeavesEndsBothPrefills(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &storing{}, "p0 p1 d0", config.Retry{Hedge: time.Second},
			func(string, int) response { return hangs })
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(3*time.Second, cancel)
		_, err := f.flow.Do(ctx, &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`)})
		require.ErrorIs(t, err, pdflow.CodeClientGone)
		synctest.Wait()
		require.Len(t, f.seen.list(), 2)
		require.Empty(t, f.flow.Sessions())
		require.Equal(t, "p0 p1", f.hosts())
	})
}

// Second prefills are retries to the budget, of which they may take half: if all prefills are slow, few are doubled.
func TestSecondPrefillsKeepToTheBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &storing{}, "p0 p1 d0", config.Retry{Hedge: time.Second},
			func(host string, _ int) response { return after(2*time.Second, replies(200)) })
		var all sync.WaitGroup
		for range 500 {
			all.Go(func() { require.NoError(t, f.do(`{"prompt":"hi"}`)) })
			time.Sleep(10 * time.Millisecond)
		}
		all.Wait()
		require.InDelta(t, 50, len(f.sent())-2*500, 20)
		require.Positive(t, f.told.why("pd.hedges", "", "budget"))
	})
}

// crowded is a picker whose second pick waits until its context ends, as where requests are admitted.
type crowded struct {
	picks   atomic.Int32
	late    bool // it has a pick even then
	waiting time.Duration
}

func (c *crowded) pick(ctx context.Context, inner pdflow.Picker, in *pdflow.PickInput) (pdflow.Pick, error) {
	if c.picks.Add(1) > 1 {
		began := time.Now()
		select {
		case <-time.After(time.Minute):
		case <-ctx.Done():
		}
		if c.waiting = time.Since(began); !c.late {
			return pdflow.Pick{}, ctx.Err()
		}
	}
	return inner.Pick(ctx, in)
}

// A second prefill that waits for an engine does not hold up the response of the first.
func TestTheFirstPrefillDoesNotWaitForThePickOfTheSecond(t *testing.T) {
	for _, late := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			open, inner := &openPicks{}, pick.New(setOf(t, endpoint(t, "http://p0", discovery.RolePrefill),
				endpoint(t, "http://p1", discovery.RolePrefill), endpoint(t, "http://d0", discovery.RoleDecode)),
				pick.RoundRobin(), pick.WithSeed(1))
			picker := &crowded{late: late}
			f := &fakeFleet{n: map[string]int{}, answer: func(string, int) response {
				return after(2*time.Second, replies(200))
			}}
			var err error
			f.flow, err = pdflow.New(&storing{}, around{around{inner, open.pick}, picker.pick}, pdflow.WithTransport(f),
				pdflow.WithRetry(config.Retry{Hedge: time.Second}))
			require.NoError(t, err)
			began := time.Now()
			require.NoError(t, f.do(`{"prompt":"hi"}`))
			require.Equal(t, 4*time.Second, time.Since(began), "prefill and decode")
			require.Equal(t, time.Second, picker.waiting)
			require.Len(t, f.sent(), 2, "no second prefill")
			require.NoError(t, f.flow.Shutdown(t.Context()))
			require.Zero(t, open.open.Load())
		})
	}
}

// An observer that panics at the start of the second prefill ends the first one, too: with its pick, and its bytes.
func TestAPanicAtTheSecondPrefillEndsTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		open, inner := &openPicks{}, pick.New(setOf(t, endpoint(t, "http://p0", discovery.RolePrefill),
			endpoint(t, "http://p1", discovery.RolePrefill), endpoint(t, "http://d0", discovery.RoleDecode)),
			pick.RoundRobin(), pick.WithSeed(1))
		budget, ends := &pdflow.Budget{Bytes: 1000}, make(chan struct{})
		f := &fakeFleet{n: map[string]int{}, answer: func(string, int) response {
			return func(r *http.Request) (*http.Response, error) {
				body, pipe := io.Pipe() // a response that has begun
				context.AfterFunc(r.Context(), func() { _ = pipe.CloseWithError(r.Context().Err()); close(ends) })
				return &http.Response{StatusCode: 200, Body: body, ContentLength: 100}, nil
			}
		}}
		var starts atomic.Int32
		var err error
		f.flow, err = pdflow.New(&storing{}, around{inner, open.pick}, pdflow.WithTransport(f),
			pdflow.WithBudget(budget),
			pdflow.WithRetry(config.Retry{Hedge: time.Second}), pdflow.WithObserver(pdflow.Observer{
				SessionStart: func(context.Context, *connector.Session) {
					if starts.Add(1) == 2 {
						require.EqualValues(t, 100, budget.InUse())
						panic("boom")
					}
				}}))
		require.NoError(t, err)
		require.ErrorIs(t, f.do(`{"prompt":"hi"}`), pdflow.CodeInternal)
		<-ends
		require.Zero(t, open.open.Load(), "each pick is told its end")
		require.Zero(t, budget.InUse())
		require.NoError(t, f.flow.Shutdown(t.Context()))
	})
}

// A flow that serves for another one hedges, too.
func TestAFallbackFlowHedges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answer := func(host string, _ int) response {
			if host == "p0" {
				return after(5*time.Second, replies(200))
			}
			return replies(200)
		}
		f := newFakeFleet(t, &storing{}, "p0 p1 d0", config.Retry{Hedge: 2 * time.Second}, answer)
		outer, err := pdflow.New(&fake{}, pick.New(setOf(t), pick.RoundRobin()), pdflow.WithTransport(f),
			pdflow.WithoutPickWait(), pdflow.WithFallback(config.FallbackConnector, f.flow))
		require.NoError(t, err)
		began := time.Now()
		resp, err := outer.Do(t.Context(),
			&pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`)})
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, 2*time.Second, time.Since(began), f.hosts())
		require.Equal(t, pdflow.ModeFallback, resp.Mode)
		require.NoError(t, outer.Shutdown(t.Context()))
	})
}

// A client whose prompts take long at every engine draws second prefills, at any rate. They leave others the retries
// that faults of the network need.
func TestLongPromptsLeaveOthersTheirRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var closed, prefills atomic.Int64
		f := newFakeFleet(t, &storing{}, "p0 p1 d0", config.Retry{MaxAttempts: 3, Hedge: time.Second}, nil,
			pdflow.WithTransport(roundTrips(func(r *http.Request) (*http.Response, error) {
				body, _ := io.ReadAll(r.Body)
				switch long := strings.Contains(string(body), "long"); {
				case long && r.URL.Host != "d0":
					prefills.Add(1)
					return after(3*time.Second, replies(200))(r)
				case r.URL.Host == "p0" && closed.Add(1)%4 == 0:
					return nil, io.ErrUnexpectedEOF
				}
				return replies(200)(r)
			})))
		var all sync.WaitGroup
		var long, good, failed atomic.Int64
		begun := time.Now()
		all.Go(func() {
			for ; time.Since(begun) < 30*time.Second; time.Sleep(20 * time.Millisecond) {
				long.Add(1)
				all.Go(func() { require.NoError(t, f.do(`{"prompt":"long"}`)) })
			}
		})
		for ; time.Since(begun) < 30*time.Second; time.Sleep(333 * time.Millisecond) {
			good.Add(1)
			all.Go(func() {
				if f.do(`{"prompt":"good"}`) != nil {
					failed.Add(1)
				}
			})
		}
		all.Wait()
		t.Logf("%d of %d others failed; %d long prompts were prefilled %d times", failed.Load(), good.Load(),
			long.Load(), prefills.Load())
		require.Zero(t, failed.Load())
		require.Less(t, prefills.Load(), long.Load()*12/10)
	})
}
