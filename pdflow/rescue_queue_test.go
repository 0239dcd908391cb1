// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
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

// dyingFleet is two prefill engines and two decode engines in fake time. The first decode engine has all streams, and
// dies with them. Of the prefill engines the one with fewer picks is taken.
type dyingFleet struct {
	t         *testing.T
	flow      *pdflow.Flow
	count     book
	dead      chan struct{} // closed when the first decode engine dies
	prefills  time.Duration // how long a prefill takes; 0: until the leg is cancelled
	p, d      [2]discovery.Endpoint
	back      chan struct{} // not nil: no engines are there until it is closed
	picker    pdflow.Picker // not nil: picks for rescues
	hangs     string        // the host of an engine that takes rescuing legs and does not respond
	gone      string        // the ID of the prefill engine that is not picked
	fails     string        // the host of an engine that fails rescuing legs after their time
	decodes   time.Duration // until the first event of a rescue
	changes   chan struct{} // not nil: closed when the list of engines changes
	clients   sync.WaitGroup
	responses []string // of clients whose streams have ended
	errs      []error

	mu             sync.Mutex
	inFlight, most map[string]int // rescuing prefills, by host
	all            map[string]int
	sent, picks    int            // rescuing prefills, and picks for them
	open           map[string]int // picks, by the ID of the prefill engine
}

func newDyingFleet(t *testing.T, prefills time.Duration, opts ...pdflow.Option) *dyingFleet {
	t.Helper()
	f := &dyingFleet{t: t, dead: make(chan struct{}), prefills: prefills, inFlight: map[string]int{},
		most: map[string]int{}, all: map[string]int{}, open: map[string]int{}}
	for i, n := range []string{"0", "1"} {
		f.p[i] = endpoint(t, "http://p"+n, discovery.RolePrefill)
		f.d[i] = endpoint(t, "http://d"+n, discovery.RoleDecode)
	}
	var err error
	f.flow, err = pdflow.New(&fake{}, f, append([]pdflow.Option{pdflow.WithRescue(1), pdflow.WithTransport(f),
		metered(&f.count), pdflow.WithRetry(config.Retry{MaxAttempts: 1}),
		pdflow.WithTimeouts(config.Timeouts{Prefill: config.None, Idle: time.Hour})}, opts...)...)
	require.NoError(t, err)
	return f
}

func (f *dyingFleet) Pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	if in.Attempt == 1 {
		return pdflow.Pick{Prefill: f.p[0], Decode: f.d[0]}, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.picks++
	if f.picker != nil {
		return f.picker.Pick(ctx, in)
	}
	select {
	case <-f.back:
	default:
		if f.back != nil {
			return pdflow.Pick{}, pdflow.CodeNoEndpoint
		}
	}
	p := f.p[0]
	if f.gone == p.ID || f.gone == "" && f.open[p.ID] > f.open[f.p[1].ID] {
		p = f.p[1]
	}
	f.open[p.ID]++
	return pdflow.Pick{Prefill: p, Decode: f.d[1], Done: func(*pdflow.Outcome) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.open[p.ID]--
	}}, nil
}

func (*dyingFleet) Ready(*pdflow.PickInput) error { return nil }

func (f *dyingFleet) Bind(connector.KVConnector, connector.Serving) pdflow.Picker { return f }

func (f *dyingFleet) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.back != nil {
		return f.back
	}
	return f.changes
}

func (f *dyingFleet) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		_, _ = io.Copy(io.Discard, r.Body)
	}
	resp := &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, ContentLength: -1,
		TransferEncoding: []string{"chunked"}, Request: r}
	leg, _ := pdflow.LegFromContext(r.Context())
	switch {
	case leg.Leg == pdflow.LegPrefill && leg.Attempt > 1:
		f.begun(r.URL.Host, 1)
		defer f.begun(r.URL.Host, -1)
		over := make(<-chan time.Time)
		if f.prefills > 0 && f.hangs != r.URL.Host {
			over = time.After(f.prefills)
		}
		select {
		case <-over:
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
		if f.fails == r.URL.Host {
			return nil, errors.New("broke")
		}
		fallthrough
	case leg.Leg == pdflow.LegPrefill:
		resp.Body = io.NopCloser(strings.NewReader(ok))
	case leg.Attempt == 1:
		resp.Header.Set("Content-Type", "text/event-stream")
		out, in := io.Pipe()
		go func() {
			_, _ = io.WriteString(in, token(10, "null", "[1,2,3]")+token(11, "null", "null"))
			select {
			case <-f.dead:
			case <-r.Context().Done():
			}
			_ = in.CloseWithError(errors.New("broke"))
		}()
		resp.Body = out
	default:
		select {
		case <-time.After(f.decodes):
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
		resp.Header.Set("Content-Type", "text/event-stream")
		resp.Body = io.NopCloser(strings.NewReader(token(12, `"length"`, "[1,2,3,10,11]") + theEnd))
	}
	return resp, nil
}

func (f *dyingFleet) begun(host string, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inFlight[host] += n
	f.most[host] = max(f.most[host], f.inFlight[host])
	f.sent += max(n, 0)
	f.all[host] += max(n, 0)
}

// stream begins streams, which all have their first tokens when it returns, and reads them to their end.
func (f *dyingFleet) stream(ctx context.Context, n int) {
	f.t.Helper()
	for range n {
		f.clients.Go(func() {
			resp, err := f.flow.Do(ctx, &pdflow.Request{API: connector.APICompletions,
				Body: []byte(completion("a", `"stream":true`))})
			if !assert.NoError(f.t, err) {
				return
			}
			got, err := io.ReadAll(resp.Body)
			assert.NoError(f.t, resp.Body.Close())
			f.mu.Lock()
			defer f.mu.Unlock()
			f.responses, f.errs = append(f.responses, string(got)), append(f.errs, err)
		})
	}
	synctest.Wait()
}

// whole returns how many streams were whole, and how many were cut.
func (f *dyingFleet) whole() (whole, cut int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, got := range f.responses {
		if f.errs[i] != nil {
			assert.NotContains(f.t, got, "[DONE]")
			cut++
			continue
		}
		for _, text := range []string{"t10 ", "t11 ", "t12 ", "[DONE]"} {
			assert.Equal(f.t, 1, strings.Count(got, text), "%q in %s", text, got)
		}
		whole++
	}
	return whole, cut
}

// end shuts the flow down. Nothing may be left then; the test's bubble looks for goroutines.
func (f *dyingFleet) end() {
	f.clients.Wait()
	assert.Empty(f.t, f.flow.Sessions())
	require.NoError(f.t, f.flow.Shutdown(f.t.Context()))
	assert.Empty(f.t, nonzero(f.open), "picks whose end was not told")
	assert.Empty(f.t, nonzero(f.inFlight))
	assert.Zero(f.t, pdflow.RescuePlaces(f.flow), "places that were not given back")
}

func nonzero(m map[string]int) map[string]int {
	all := map[string]int{}
	for k, n := range m {
		if n != 0 {
			all[k] = n
		}
	}
	return all
}

// A decode engine dies with 200 streams: at each prefill engine four are prefilled at a time, and all go on.
func TestRescuesOfManyStreamsQueueForPrefill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, time.Second)
		f.stream(t.Context(), 200)
		began := time.Now()
		close(f.dead)
		f.end()
		whole, cut := f.whole()
		assert.Equal(t, 200, whole)
		assert.Zero(t, cut)
		assert.Equal(t, map[string]int{"p0": 4, "p1": 4}, f.most)
		assert.Equal(t, 200, f.sent, "one prefill for each stream")
		assert.Equal(t, 25*time.Second, time.Since(began), "no place is left empty")
		assert.Equal(t, 200, times(f.count.rescues(), "rescued stream_broken"))
	})
}

// As many streams as there are places are rescued at once.
func TestARescueThatIsAloneDoesNotWait(t *testing.T) {
	for _, streams := range []int{1, 8} {
		synctest.Test(t, func(t *testing.T) {
			f := newDyingFleet(t, time.Second)
			f.stream(t.Context(), streams)
			began := time.Now()
			close(f.dead)
			f.end()
			whole, _ := f.whole()
			assert.Equal(t, streams, whole)
			assert.Equal(t, time.Second, time.Since(began))
		})
	}
}

// Clients that leave while their streams wait, or are prefilled, make room for the others.
func TestClientsThatLeaveDuringRescuesMakeRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, time.Second)
		leaving, leave := context.WithCancel(t.Context())
		f.stream(leaving, 8) // are prefilled
		f.stream(leaving, 52)
		f.stream(t.Context(), 40)
		began := time.Now()
		close(f.dead)
		time.Sleep(500 * time.Millisecond)
		leave()
		f.end()
		whole, cut := f.whole()
		assert.Equal(t, 40, whole)
		assert.Equal(t, 60, cut)
		assert.LessOrEqual(t, f.most["p0"], 4)
		assert.LessOrEqual(t, f.most["p1"], 4)
		assert.Less(t, f.sent, 60, "but for a few, nothing is prefilled for who left in the queue")
		assert.LessOrEqual(t, time.Since(began), 11*time.Second, "at most all at one engine")
	})
}

// A shutdown without time left cuts the streams that wait, and those that are prefilled.
func TestShutdownCutsRescuesThatWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, 0)
		f.stream(t.Context(), 200)
		close(f.dead)
		time.Sleep(time.Second)
		began := time.Now()
		none, stop := context.WithCancel(t.Context())
		stop()
		require.ErrorIs(t, f.flow.Shutdown(none), context.Canceled)
		f.end()
		_, cut := f.whole()
		assert.Equal(t, 200, cut)
		assert.Equal(t, 200, times(f.count.rescues(), "failed draining"))
		assert.Less(t, f.sent, 100, "but for some whose turn comes while one after the other is cut")
		assert.Zero(t, time.Since(began))
	})
}

// A stream waits for its rescue no longer than a prefill may take and a response may be silent; without one of these
// limits, as long as it takes.
func TestARescueDoesNotWaitForever(t *testing.T) {
	for _, c := range []struct {
		limits config.Timeouts
		cut    int
	}{
		{config.Timeouts{Prefill: 2 * time.Second, Idle: 1500 * time.Millisecond}, 28},
		{config.Timeouts{Prefill: config.None, Idle: 1500 * time.Millisecond}, 0},
		{config.Timeouts{Prefill: 2 * time.Second, Idle: config.None}, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := newDyingFleet(t, time.Second, pdflow.WithTimeouts(c.limits))
			f.stream(t.Context(), 60)
			close(f.dead)
			f.end()
			whole, cut := f.whole()
			assert.Equal(t, c.cut, cut)
			assert.Equal(t, 60-c.cut, whole)
			assert.Equal(t, c.cut, times(f.count.rescues(), "failed overloaded"))
		})
	}
}

// A place is free when its prefill has ended, however long decode takes then.
func TestRescuesDoNotWaitForDecode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, time.Second)
		f.decodes = 5 * time.Minute
		f.stream(t.Context(), 40)
		began := time.Now()
		close(f.dead)
		f.end()
		whole, _ := f.whole()
		assert.Equal(t, 40, whole)
		assert.Equal(t, map[string]int{"p0": 4, "p1": 4}, f.most)
		assert.Equal(t, 5*time.Second+f.decodes, time.Since(began))
	})
}

// Failures do not have everybody pick again each time.
func TestRescuesThatFailCostFewPicks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, 100*time.Millisecond)
		f.gone, f.fails = f.p[1].ID, "p0"
		f.stream(t.Context(), 400)
		close(f.dead)
		f.end()
		_, cut := f.whole()
		assert.Equal(t, 400, cut)
		assert.Equal(t, 400, f.sent)
		assert.Less(t, f.picks, 400*12)
	})
}

// A stream whose turn comes after the list of engines has changed is not sent to an engine that is gone.
func TestRescuesPickAgainAfterAChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, time.Second)
		f.changes = make(chan struct{})
		f.stream(t.Context(), 40)
		began := time.Now()
		close(f.dead)
		time.Sleep(500 * time.Millisecond)
		f.mu.Lock()
		f.gone = f.p[0].ID
		close(f.changes)
		f.changes = nil
		f.mu.Unlock()
		f.end()
		whole, _ := f.whole()
		assert.Equal(t, 40, whole)
		assert.Equal(t, map[string]int{"p0": 4, "p1": 36}, f.all)
		assert.Equal(t, 9*time.Second, time.Since(began))
	})
}

// A prefill engine that hangs costs the streams that have a place there an attempt, and those that wait none.
func TestRescuesDoNotGoOnToWaitForAnEngineThatFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, time.Second, pdflow.WithTimeouts(config.Timeouts{Prefill: 5 * time.Second}),
			pdflow.WithRetry(config.Retry{MaxAttempts: 2, Budget: 1}))
		f.hangs = "p0"
		f.stream(t.Context(), 40)
		began := time.Now()
		close(f.dead)
		time.Sleep(4 * time.Second)
		f.mu.Lock()
		f.gone = f.p[0].ID
		f.mu.Unlock()
		f.end()
		whole, _ := f.whole()
		assert.Equal(t, 40, whole)
		assert.Equal(t, 44, f.sent, "four had an attempt that failed")
		assert.Less(t, time.Since(began), 15*time.Second)
	})
}

// Streams of one model do not wait for those of another, whose engine is another.
func TestRescuesWaitOnlyForTheirOwnEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, 10*time.Second)
		f.gone = f.p[1].ID
		f.stream(t.Context(), 40)
		first := f.dead
		f.dead = make(chan struct{})
		f.stream(t.Context(), 1)
		close(first)
		synctest.Wait()
		f.mu.Lock()
		f.gone = f.p[0].ID
		f.mu.Unlock()
		began := time.Now()
		close(f.dead)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		assert.Equal(t, map[string]int{"p0": 4, "p1": 1}, f.most)
		whole, _ := f.whole()
		assert.Equal(t, 5, whole, "after %s", time.Since(began))
		f.end()
	})
}

// Engines of both roles: the one that died has room for prefills, and gets none.
func TestRescuesAreNotSentToTheEngineThatDied(t *testing.T) {
	both := discovery.RolePrefill | discovery.RoleDecode
	set := setOf(t, endpoint(t, "http://d0", both), endpoint(t, "http://d1", both), endpoint(t, "http://d2", both))
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, time.Second)
		f.picker, f.hangs = pick.New(set, pick.RoundRobin(), pick.WithSeed(1)), "d0"
		f.stream(t.Context(), 100)
		began := time.Now()
		close(f.dead)
		f.end()
		whole, _ := f.whole()
		assert.Equal(t, 100, whole)
		assert.Equal(t, map[string]int{"d1": 4, "d2": 4}, f.most)
		assert.Less(t, time.Since(began), 20*time.Second)
	})
}

// Where no engine is left, all streams wait for one at the same time, and not one after the other.
func TestRescuesWaitForEnginesTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, time.Second)
		f.stream(t.Context(), 200)
		f.back = make(chan struct{})
		began := time.Now()
		close(f.dead)
		f.end()
		_, cut := f.whole()
		assert.Equal(t, 200, cut)
		assert.Equal(t, 200, times(f.count.rescues(), "failed no_endpoint"))
		assert.Equal(t, 250*time.Millisecond, time.Since(began))
	})
}

// Engines that are away for a moment when the streams break cost none of these its rescue.
func TestRescuesOutliveAMomentWithoutEngines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, time.Second)
		f.stream(t.Context(), 40)
		back := make(chan struct{})
		f.back = back
		began := time.Now()
		close(f.dead)
		time.Sleep(200 * time.Millisecond)
		f.mu.Lock()
		f.back = nil
		f.mu.Unlock()
		close(back)
		f.end()
		whole, _ := f.whole()
		assert.Equal(t, 40, whole)
		assert.Equal(t, 5200*time.Millisecond, time.Since(began))
	})
}

// A picker panics when a stream's turn has come and the list of engines has changed. The stream is cut, and its place
// is another one's.
func TestAPickThatPanicsKeepsNoPlaceOfARescue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, time.Second)
		f.gone, f.changes = f.p[1].ID, make(chan struct{})
		f.stream(t.Context(), 8)
		close(f.dead)
		time.Sleep(500 * time.Millisecond)
		f.mu.Lock()
		close(f.changes)
		f.changes = nil
		f.picker = pick.Func(func(context.Context, *pdflow.PickInput) (pdflow.Pick, error) { panic("picker") })
		f.mu.Unlock()
		f.end()
		whole, cut := f.whole()
		assert.Equal(t, []int{4, 4}, []int{whole, cut})
	})
}

// The same of a pick's Done, when the flow gives the pick back.
func TestADoneThatPanicsKeepsNoPlaceOfARescue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newDyingFleet(t, time.Second)
		f.changes = make(chan struct{})
		f.picker = pick.Func(func(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
			return pdflow.Pick{Prefill: f.p[0], Decode: f.d[1], Done: func(o *pdflow.Outcome) {
				if o.Err != nil {
					panic("done")
				}
			}}, nil
		})
		f.stream(t.Context(), 8)
		close(f.dead)
		time.Sleep(500 * time.Millisecond)
		f.mu.Lock()
		close(f.changes)
		f.changes = nil
		f.mu.Unlock()
		f.end()
	})
}

// The flow to which requests fall back has another connector, which cannot go on with a stream of this one's.
func TestARescueDoesNotFallBackToAnotherFlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		other := inMemory(t, 0)
		f := newDyingFleet(t, time.Second, pdflow.WithFallback(config.FallbackConnector, other.flow))
		f.stream(t.Context(), 1)
		f.back = make(chan struct{})
		close(f.dead)
		f.end()
		_, cut := f.whole()
		assert.Equal(t, 1, cut)
		assert.Empty(t, other.hosts())
	})
}
