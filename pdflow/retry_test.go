// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// leaving is a connector whose decode engines wait for KV, also after their prefill has failed.
type leaving struct{ fake }

func (l *leaving) Traits() connector.Traits {
	t := l.fake.Traits()
	t.Ending.Orphans = true
	return t
}

// Each failed attempt says in its outcome, by a counter and in the request's span why another one follows, or why none
// does.
func TestEachRetryAndEachThatIsNotMadeHasAReason(t *testing.T) {
	serial := &fake{order: connector.PrefillThenDecode}
	two := config.Retry{MaxAttempts: 2}
	for name, c := range map[string]struct {
		conn    connector.KVConnector
		engines string
		retry   config.Retry
		answers map[string]response
		want    string // legs, then code, then the reason of each failed attempt
		told    string // counter and event
	}{
		"prefill runs out of time, and another is there": {serial, "p0 p1 d0", two,
			map[string]response{"p0": hangs},
			"p0,p1,d0; timeout", "pd.retries timeout/timeout"},
		"prefill runs out of time, and no other is there": {serial, "p0 d0", two,
			map[string]response{"p0": hangs},
			"p0 timeout; no_pair", "pd.retries.skipped timeout/no_pair"},
		"a prefill's timeout is final by policy": {serial, "p0 p1 d0", config.Retry{MaxAttempts: 2, TimeoutFinal: true},
			map[string]response{"p0": hangs},
			"p0 timeout; timeout", "pd.retries.skipped timeout/timeout"},
		"all prefills run out of time": {serial, "p0 p1 d0", two,
			map[string]response{"p0": hangs, "p1": hangs},
			"p0,p1 timeout; timeout, attempts", "pd.retries.skipped timeout/attempts"},
		"decode runs out of time": {serial, "p0 p1 d0 d1", two,
			map[string]response{"d0": hangs},
			"p0,d0 timeout; timeout", "pd.retries.skipped timeout/timeout"},
		"decode waits for the prefill": {&leaving{fake{order: connector.Together}}, "p0 p1 d0", two,
			map[string]response{"p0": hangs, "d0": hangs},
			"d0,p0 timeout; orphan", "pd.retries.skipped timeout/orphan"},
		"decode does not wait for the prefill": {&fake{order: connector.Together}, "p0 p1 d0", two,
			map[string]response{"p0": hangs, "d0": hangs},
			"d0,d0,p0,p1 timeout; timeout, timeout", "pd.retries timeout/timeout"},
		"prefill fails": {serial, "p0 p1 d0", two,
			map[string]response{"p0": replies(500)},
			"p0,p1,d0; failed", "pd.retries prefill_failed/failed"},
		"prefill refuses": {serial, "p0 p1 d0", two,
			map[string]response{"p0": replies(400)},
			"p0 prefill_rejected; final", "pd.retries.skipped prefill_rejected/final"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeFleet(t, c.conn, c.engines, c.retry,
					func(host string, _ int) response {
						if answer := c.answers[host]; answer != nil {
							return answer
						}
						return replies(200)
					})
				err := f.do(`{"prompt":"hi"}`)
				legs := strings.Fields(f.hosts())
				if c.conn.Traits().Order == connector.Together {
					slices.Sort(legs)
				}
				got := strings.Join(legs, ",")
				if err != nil {
					got += " " + string(codeOf(err))
				}
				var reasons []string
				for _, o := range f.seen.list() {
					if o.Err != nil {
						reasons = append(reasons, o.Retry)
					}
				}
				require.Equal(t, c.want, got+"; "+strings.Join(reasons, ", "))
				counter, rest, _ := strings.Cut(c.told, " ")
				code, reason, _ := strings.Cut(rest, "/")
				require.Equal(t, 1, f.told.why(counter, code, reason), "%v", f.told.list())
				event := map[string]string{"pd.retries": "pd.retry", "pd.retries.skipped": "pd.retry.skipped"}[counter]
				begin, end := "pd.request>"+event+" error.type="+code+" pd.endpoint=", " pd.reason="+reason
				told := func(e string) bool { return strings.HasPrefix(e, begin) && strings.HasSuffix(e, end) }
				require.True(t, slices.ContainsFunc(f.spans.events, told), "%v", f.spans.events)
			})
		})
	}
}

// A caller that has chosen the pair, and a client that left, get no retry.
func TestAGivenPairIsNotRetriedAndSaysSo(t *testing.T) {
	x := script(t, &fake{}, status(500), answer(ok), pdflow.WithRetry(config.Retry{MaxAttempts: 2}))
	_, err := x.flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`),
		Pick: &x.pair})
	require.ErrorIs(t, err, pdflow.CodePrefillFailed)
	o := x.seen.list()
	require.Len(t, o, 1)
	require.Equal(t, "given", o[0].Retry)
	require.True(t, o[0].Final)
}

// While all engines fail, a flow sends a fifth more legs than it gets requests, and not twice as many.
func TestAnOutageIsNotMultipliedByRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &fake{}, "p0 p1 p2 d0", config.Retry{MaxAttempts: 3},
			func(string, int) response { return replies(500) })
		const requests = 1000
		var all sync.WaitGroup
		for range requests {
			all.Go(func() { require.ErrorIs(t, f.do(`{"prompt":"hi"}`), pdflow.CodePrefillFailed) })
			time.Sleep(time.Millisecond)
		}
		all.Wait()
		retries := len(f.sent()) - requests
		require.Equal(t, retries, f.told.why("pd.retries", "prefill_failed", "failed"))
		// the floor of three at a time comes on top: each is over after 75 ms at the latest
		require.InDelta(t, requests/5, retries, 60)
		require.Positive(t, f.told.why("pd.retries.skipped", "prefill_failed", "budget"))
		time.Sleep(time.Minute)
		before := len(f.sent())
		require.Error(t, f.do(`{"prompt":"hi"}`))
		require.Equal(t, 2, len(f.sent())-before, "a lone request is retried until two engines have failed it")
	})
}

// A panic in the middle of a retry gives its part of the budget back.
func TestAPanicLeavesTheBudgetWhole(t *testing.T) {
	var boom bool
	c := &fake{prefill: func(s *connector.Session, _ *connector.Leg) error {
		if s.Attempt > 1 && boom {
			panic("boom")
		}
		return nil
	}}
	x := script(t, c, status(500), answer(ok), pdflow.WithRetry(config.Retry{MaxAttempts: 2, BackoffBase: config.None}))
	boom = true
	for range 5 {
		require.Equal(t, 500, post(t, x.url, "/v1/completions", completion("a", "")).status)
	}
	boom = false
	before := strings.Count(x.all(), "P")
	require.Equal(t, 502, post(t, x.url, "/v1/completions", completion("a", "")).status)
	require.Equal(t, 2, strings.Count(x.all(), "P")-before, "the retry that is always allowed")
}

// pauses returns the times between the two legs that each of n requests sends to the only prefill engine, which fails
// the first.
func pauses(t *testing.T, n int, engines string, retry config.Retry, header ...string) []time.Duration {
	t.Helper()
	f := newFakeFleet(t, &fake{}, engines, retry,
		func(host string, nth int) response {
			if host == "p0" && nth%2 == 1 {
				return replies(503, header...)
			}
			return replies(200)
		})
	for range n {
		require.NoError(t, f.do(`{"prompt":"hi"}`))
		time.Sleep(10 * time.Second)
	}
	var all []time.Duration
	legs := f.sent()
	for i := range legs {
		if i > 0 && legs[i].host[0] == 'p' && legs[i-1].host == "p0" {
			all = append(all, legs[i].at.Sub(legs[i-1].at))
		}
	}
	require.Len(t, all, n)
	return all
}

func TestThePauseBeforeARetryIsRandomFromZeroOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all := pauses(t, 600, "p0 d0", config.Retry{BackoffBase: time.Second})
		slices.Sort(all)
		require.Less(t, all[60], 200*time.Millisecond, "a tenth is short")
		require.Greater(t, all[540], 800*time.Millisecond, "a tenth is long")
		require.LessOrEqual(t, all[599], time.Second)
	})
}

func TestRetryAfterOfAnEngineIsHeededUpToTheLongestPause(t *testing.T) {
	retry := config.Retry{BackoffBase: time.Millisecond, BackoffMax: 3 * time.Second}
	for name, c := range map[string]struct {
		after func() string
		want  time.Duration
	}{
		"a second":     {func() string { return "1" }, time.Second},
		"a day":        {func() string { return "86400" }, 3 * time.Second},
		"no number":    {func() string { return "soon" }, 0},
		"negative":     {func() string { return "-5" }, 0},
		"out of range": {func() string { return "99999999999999999999" }, 0},
		"a date": {func() string { return time.Now().Add(2 * time.Second).UTC().Format(http.TimeFormat) },
			2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := pauses(t, 1, "p0 d0", retry, "Retry-After", c.after())[0]
				require.InDelta(t, c.want, got, float64(time.Millisecond))
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &fake{}, "p0 p1 d0", retry,
			func(host string, _ int) response {
				if host == "p0" {
					return replies(503, "Retry-After", "1")
				}
				return replies(200)
			})
		began := time.Now()
		require.NoError(t, f.do(`{"prompt":"hi"}`))
		require.Equal(t, "p0 p1 d0", f.hosts())
		require.Less(t, time.Since(began), 10*time.Millisecond, "another engine did not ask to wait")
	})
}

// A client that leaves while a retry waits for Retry-After ends the wait, and the picker hears of its pick.
func TestAClientThatLeavesDuringRetryAfterEndsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &fake{}, "p0 d0", config.Retry{BackoffBase: config.None, BackoffMax: time.Hour},
			func(string, int) response {
				return replies(503, "Retry-After", "60")
			})
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errors.New("left"))
		defer cancel()
		began := time.Now()
		_, err := f.flow.Do(ctx, &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`)})
		require.ErrorIs(t, err, pdflow.CodeClientGone)
		require.Equal(t, time.Second, time.Since(began))
		require.Empty(t, f.flow.Sessions())
	})
}

// Whatever comes when, retries never exceed the larger of the floor and the share.
func TestTheBudgetHoldsForAnyLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(1, 2))
		f := newFakeFleet(t, &fake{}, "p0 p1 d0", config.Retry{MaxAttempts: 2, Budget: 0.1},
			func(host string, nth int) response { return replies(500) })
		var all sync.WaitGroup
		requests := 0
		for range 30 {
			for range r.IntN(100) {
				requests++
				body := `{"prompt":"` + strconv.Itoa(requests) + `"}`
				all.Go(func() { _ = f.do(body) })
			}
			time.Sleep(time.Second)
		}
		all.Wait()
		retries := len(f.sent()) - requests
		require.Greater(t, retries, requests/20)
		require.Less(t, retries, requests/10+30*3+1)
	})
}

// roundTrips is a transport that is a function.
type roundTrips func(*http.Request) (*http.Response, error)

func (f roundTrips) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A client whose bodies draw an error from every engine leaves others their retries: P closes every fourth connection,
// and nobody else sees it.
func TestBodiesThatEveryEngineFailsLeaveOthersTheirRetries(t *testing.T) {
	for name, c := range map[string]struct {
		status int // that the bodies draw
		every  time.Duration
	}{
		"of 500":     {500, 20 * time.Millisecond},
		"of 503":     {503, 20 * time.Millisecond},
		"many of it": {500, 10 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var closed, legs atomic.Int64
				f := newFakeFleet(t, &fake{}, "p0 p1 d0", config.Retry{MaxAttempts: 3}, nil,
					pdflow.WithTransport(roundTrips(func(r *http.Request) (*http.Response, error) {
						body, _ := io.ReadAll(r.Body)
						switch bad := strings.Contains(string(body), "bad"); {
						case bad && r.URL.Host != "d0":
							legs.Add(1)
							return replies(c.status)(r)
						case r.URL.Host == "p0" && closed.Add(1)%4 == 0:
							return nil, io.ErrUnexpectedEOF
						}
						return replies(200)(r)
					})))
				var all sync.WaitGroup
				var bad, failed, good atomic.Int64
				begun := time.Now()
				all.Go(func() {
					for ; time.Since(begun) < 30*time.Second; time.Sleep(c.every) {
						body := `{"prompt":"bad ` + strconv.Itoa(int(bad.Add(1))) + `"}`
						all.Go(func() { require.Error(t, f.do(body)) })
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
				t.Logf("%d of %d others failed; %d bad ones had %d legs", failed.Load(), good.Load(), bad.Load(),
					legs.Load())
				require.Zero(t, failed.Load())
				if c.status == 500 {
					require.LessOrEqual(t, legs.Load(), 2*bad.Load())
				}
			})
		})
	}
}

// What two engines have answered to the same body is its own fault: a third one is not asked.
func TestWhatTwoEnginesAnswerIsFinal(t *testing.T) {
	for name, c := range map[string]struct {
		status int
		want   string
	}{
		"an error of the body's": {500, "p0 p1; failed/body"},
		"engines that are full":  {503, "p0 p1 p2; failed/failed/attempts"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeFleet(t, &fake{}, "p0 p1 p2 d0", config.Retry{MaxAttempts: 3},
					func(string, int) response { return replies(c.status) })
				require.Error(t, f.do(`{"prompt":"hi"}`))
				var reasons []string
				for _, o := range f.seen.list() {
					reasons = append(reasons, o.Retry)
				}
				require.Equal(t, c.want, f.hosts()+"; "+strings.Join(reasons, "/"))
			})
		})
	}
}

// Where the attempt that was to follow finds no engines, or the client has left, the one before was the last.
func TestTheLastAttemptThatAnybodySeesIsFinal(t *testing.T) {
	lost := streaming(0, io.ErrUnexpectedEOF, token(10, "null", "[1,2,3]"), token(11, "null", "null"))
	var leave context.CancelFunc
	for name, c := range map[string]struct {
		engines  string
		retry    config.Retry
		d0       response
		stream   bool
		fallback bool
		want     string // of each attempt: its end, Final, Retry
	}{
		"nobody else may serve": {engines: "p0 d0", d0: replies(500), retry: config.Retry{MaxAttempts: 2},
			want: "decode_failed true no_pair"},
		"nor alone": {engines: "p0 d0", d0: replies(500), fallback: true, retry: config.Retry{MaxAttempts: 1},
			want: "decode_failed true attempts"},
		"the client leaves in between": {engines: "p0 d0 d1", retry: config.Retry{MaxAttempts: 2,
			BackoffBase: time.Hour, BackoffMax: time.Hour}, d0: func(r *http.Request) (*http.Response, error) {
			time.AfterFunc(time.Second, leave)
			return replies(500)(r)
		}, want: "decode_failed true "},
		"nobody goes on with the stream": {engines: "p0 d0", d0: lost, stream: true,
			retry: config.Retry{MaxAttempts: 1}, want: "stream_broken true "},
		"another follows": {engines: "p0 d0 d1", d0: replies(500), retry: config.Retry{MaxAttempts: 2},
			want: "decode_failed false failed, served true "},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				gone := false
				opts := []pdflow.Option{pdflow.WithRescue(1)}
				if c.fallback {
					opts = append(opts, pdflow.WithFallback(config.FallbackDecode))
				}
				f := newFakeFleetOf(t, func(ctx context.Context, inner pdflow.Picker, in *pdflow.PickInput) (
					pdflow.Pick, error) {
					if gone && c.engines == "p0 d0" {
						return pdflow.Pick{}, pdflow.CodeNoEndpoint
					}
					gone = true
					return inner.Pick(ctx, in)
				}, &fake{}, c.engines, c.retry, func(host string, _ int) response {
					if host == "d0" {
						return c.d0
					}
					return replies(200)
				}, opts...)
				in := &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`)}
				if c.stream {
					in.Body = []byte(completion("a", `"stream":true`))
				}
				var ctx context.Context
				ctx, leave = context.WithCancel(t.Context())
				if resp, err := f.flow.Do(ctx, in); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
				leave()
				var got []string
				for _, o := range f.seen.list() {
					end := "served"
					if o.Err != nil {
						end = string(o.Err.Code)
					}
					got = append(got, end+" "+strconv.FormatBool(o.Final)+" "+o.Retry)
				}
				require.Equal(t, c.want, strings.Join(got, ", "))
			})
		})
	}
}
