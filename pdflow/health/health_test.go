// SPDX-License-Identifier: Apache-2.0

package health_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/pdflow/health"
)

// engines is a round tripper that answers for any number of engines and remembers when each was asked.
type engines struct {
	mu     sync.Mutex
	asked  map[string][]time.Time
	answer func(req *http.Request) (*http.Response, error) // nil: 200
	flying atomic.Int32
	peak   atomic.Int32
}

func (e *engines) RoundTrip(req *http.Request) (*http.Response, error) {
	flying := e.flying.Add(1)
	defer e.flying.Add(-1)
	for peak := e.peak.Load(); flying > peak && !e.peak.CompareAndSwap(peak, flying); peak = e.peak.Load() {
	}
	e.mu.Lock()
	if e.asked == nil {
		e.asked = map[string][]time.Time{}
	}
	e.asked[req.URL.Host] = append(e.asked[req.URL.Host], time.Now())
	answer := e.answer
	e.mu.Unlock()
	if answer == nil {
		return status(200), nil
	}
	return answer(req)
}

func (e *engines) times(host string) []time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]time.Time(nil), e.asked[host]...)
}

func (e *engines) set(answer func(req *http.Request) (*http.Response, error)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.answer = answer
}

func status(code int) *http.Response { return &http.Response{StatusCode: code, Body: http.NoBody} }

func always(code int) func(*http.Request) (*http.Response, error) {
	return func(*http.Request) (*http.Response, error) { return status(code), nil }
}

func hang(req *http.Request) (*http.Response, error) {
	<-req.Context().Done()
	return nil, req.Context().Err()
}

func refused(*http.Request) (*http.Response, error) { return nil, errors.New("refused") }

// many names n engines.
func many(n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("e%d:1", i)
	}
	return ids
}

func endpoint(t testing.TB, id string) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New("http://"+id, discovery.RoleBoth)
	require.NoError(t, err)
	return e
}

// world is a set with a source the test drives and a prober that runs, inside a bubble of fake time.
type world struct {
	*discoverytest.Manual
	set    *discovery.Set
	prober *health.Prober
	cancel context.CancelFunc
}

func start(t *testing.T, o health.Options, ids ...string) *world {
	t.Helper()
	w := &world{Manual: discoverytest.NewManual()}
	w.set = discovery.NewSet(w.Manual)
	w.prober = health.New(w.set, &o)
	w.prober.Answered("a:1") // before it runs, which does nothing
	ctx, cancel := context.WithCancel(t.Context())
	w.cancel = cancel
	var wg sync.WaitGroup
	wg.Go(func() { assert.NoError(t, w.set.Run(ctx)) })
	wg.Go(func() { assert.NoError(t, w.prober.Run(ctx)) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	endpoints := make([]discovery.Endpoint, 0, len(ids))
	for _, id := range ids {
		endpoints = append(endpoints, endpoint(t, id))
	}
	w.Publish(endpoints...)
	synctest.Wait()
	return w
}

func (w *world) phases() map[string]discovery.Phase {
	phases := map[string]discovery.Phase{}
	for _, e := range w.set.Load().Endpoints {
		phases[e.ID] = e.Phase
	}
	return phases
}

func TestVerdicts(t *testing.T) {
	long := func(code int, n int) func(*http.Request) (*http.Response, error) {
		return func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: code, Body: io.NopCloser(strings.NewReader(strings.Repeat("x", n)))}, nil
		}
	}
	for name, c := range map[string]struct {
		answer func(*http.Request) (*http.Response, error)
		want   discovery.Phase
	}{
		"200 is healthy":                       {always(200), discovery.PhaseReady},
		"204 is healthy":                       {always(204), discovery.PhaseReady},
		"299 is healthy":                       {always(299), discovery.PhaseReady},
		"300 is not":                           {always(300), discovery.PhaseNotReady},
		"a redirect is not":                    {always(307), discovery.PhaseNotReady},
		"503 is not":                           {always(503), discovery.PhaseNotReady},
		"an engine that hangs is not":          {hang, discovery.PhaseNotReady},
		"an engine that cannot be reached":     {refused, discovery.PhaseNotReady},
		"a 200 with a body longer than a read": {long(200, 1<<20), discovery.PhaseReady},
		"a 500 with a body":                    {long(500, 100), discovery.PhaseNotReady},
		"a 200 whose body breaks": {func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 200,
				Body: io.NopCloser(io.MultiReader(strings.NewReader("ok"), failing{}))}, nil
		}, discovery.PhaseNotReady},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := start(t, health.Options{Client: &engines{answer: c.answer}}, "p:1")
				time.Sleep(7 * time.Second)
				synctest.Wait()
				assert.Equal(t, map[string]discovery.Phase{"p:1": c.want}, w.phases())
			})
		})
	}
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errors.New("reset") }

func TestTwoFailuresMakeNotReadyAndOneSuccessReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var observed []string
		e := &engines{answer: always(503)}
		w := start(t, health.Options{Client: e, Observe: func(id string, healthy bool, err error) {
			observed = append(observed, fmt.Sprintf("%s %v %v", id, healthy, err))
		}}, "p:1")
		ready := map[string]discovery.Phase{"p:1": discovery.PhaseReady}
		not := map[string]discovery.Phase{"p:1": discovery.PhaseNotReady}

		require.Len(t, e.times("p:1"), 1, "a lone endpoint is probed at once")
		assert.Equal(t, ready, w.phases(), "one failure is not enough")
		time.Sleep(2200 * time.Millisecond)
		synctest.Wait()
		require.Len(t, e.times("p:1"), 2)
		assert.Equal(t, not, w.phases(), "two failures in a row are")
		e.set(always(200))
		time.Sleep(2100 * time.Millisecond)
		synctest.Wait()
		assert.Equal(t, ready, w.phases(), "one success is enough")
		assert.Equal(t, []string{"p:1 true GET /health: status 503", "p:1 false GET /health: status 503",
			"p:1 true <nil>"}, observed, "what was asked is told: a 404 may be of a wrong path")
	})
}

// alternating fails every second probe, beginning with the second.
func alternating() func(*http.Request) (*http.Response, error) {
	var n atomic.Int32
	return func(*http.Request) (*http.Response, error) {
		if n.Add(1)%2 == 0 {
			return status(503), nil
		}
		return status(200), nil
	}
}

func TestOnlyProbesInARowCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, health.Options{Client: &engines{answer: alternating()}}, "p:1")
		version := w.set.Load().Version
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Equal(t, version, w.set.Load().Version, "failures that are never two in a row")
	})
	synctest.Test(t, func(t *testing.T) {
		e := &engines{answer: always(503)}
		w := start(t, health.Options{Client: e, Successes: 2}, "p:1")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		version := w.set.Load().Version
		require.Equal(t, discovery.PhaseNotReady, w.phases()["p:1"])
		e.set(alternating())
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Equal(t, version, w.set.Load().Version, "successes that are never two in a row")
	})
}

func TestThresholdsCanBeSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &engines{answer: always(500)}
		w := start(t, health.Options{Client: e, Interval: time.Second, Failures: 4, Successes: 3}, "p:1")
		until := func(want discovery.Phase) int {
			before := len(e.times("p:1"))
			require.NoError(t, w.set.WaitReady(t.Context(), func(s *discovery.Snapshot) bool {
				return s.Endpoints[0].Phase == want
			}))
			return len(e.times("p:1")) - before
		}
		assert.Equal(t, 3, until(discovery.PhaseNotReady), "the first of four was counted already")
		e.set(always(200))
		assert.Equal(t, 3, until(discovery.PhaseReady))
	})
}

func TestEachEndpointIsAskedEveryInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &engines{}
		start(t, health.Options{Client: e}, "p:1", "d:1", "d:2")
		time.Sleep(time.Minute)
		synctest.Wait()
		for _, host := range []string{"p:1", "d:1", "d:2"} {
			at := e.times(host)
			assert.InDelta(t, 31, len(at), 1.5)
			for i := range at[1:] {
				assert.InDelta(t, 2, at[i+1].Sub(at[i]).Seconds(), 0.121, "interval give or take 6 %")
			}
		}
	})
}

func TestTheProbeIsAPlainGet(t *testing.T) {
	for path, want := range map[string]string{"": "/base/health", "/ready": "/base/ready", "ready": "/base/ready"} {
		synctest.Test(t, func(t *testing.T) {
			var got []string
			start(
				t, health.Options{Path: path, Client: &engines{answer: func(req *http.Request) (*http.Response, error) {
					_, deadline := req.Context().Deadline()
					assert.True(t, deadline)
					assert.Nil(t, req.Body)
					got = append(got, req.Method+" "+req.URL.String()+" "+req.Host)
					return status(200), nil
				}}}, "p:1/base")
			assert.Equal(t, []string{"GET http://p:1" + want + " p:1"}, got)
		})
	}
}

func TestManyEndpointsDoNotFireAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &engines{}
		ids := many(1024)
		began := time.Now()
		start(t, health.Options{Client: e}, ids...)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		perSlice := map[int64]int{}
		for _, id := range ids {
			at := e.times(id)
			require.GreaterOrEqual(t, len(at), 9)
			assert.LessOrEqual(t, at[0].Sub(began), 2*time.Second, "every endpoint is known after one interval")
			for _, a := range at {
				perSlice[a.Sub(began).Milliseconds()/100]++
			}
		}
		for slice, n := range perSlice { // 51 in a tenth of a second when spread evenly
			assert.Less(t, n, 110, "probes in tenth %d", slice)
		}
		assert.LessOrEqual(t, e.peak.Load(), int32(32), "instant responses need few probes at once")
	})
}

func TestEnginesThatHangDoNotHoldUpTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &engines{answer: func(req *http.Request) (*http.Response, error) {
			if req.URL.Host != "good:1" {
				return hang(req)
			}
			return status(200), nil
		}}
		w := start(t, health.Options{Client: e}, append(many(300), "good:1")...)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		assert.GreaterOrEqual(t, len(e.times("good:1")), 9)
		phases := w.phases()
		assert.Len(t, phases, 301)
		for id, phase := range phases {
			assert.Equal(t, id == "good:1", phase == discovery.PhaseReady, id)
		}
	})
}

func TestAnEndpointNeverHasTwoProbesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &engines{answer: hang}
		start(t, health.Options{Client: e, Timeout: 7 * time.Second}, "p:1")
		time.Sleep(time.Minute)
		synctest.Wait()
		at := e.times("p:1")
		require.GreaterOrEqual(t, len(at), 8)
		for i := range at[1:] {
			assert.GreaterOrEqual(t, at[i+1].Sub(at[i]), 7*time.Second)
			assert.LessOrEqual(t, at[i+1].Sub(at[i]), 7*time.Second+200*time.Millisecond,
				"the next one comes soon after the timeout")
		}
	})
}

func TestGoroutinesOfHangingProbesGoWithThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &engines{answer: hang}
		start(t, health.Options{Client: e}, many(300)...)
		quiet := runtime.NumGoroutine()
		time.Sleep(3 * time.Second)
		require.EqualValues(t, 300, e.peak.Load())
		e.set(nil)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		assert.Less(t, runtime.NumGoroutine(), quiet+20)
	})
}

// endless is a body that goes on for ever and counts what is read of it.
type endless struct{ read, closed atomic.Int32 }

func (b *endless) Read(p []byte) (int, error) { b.read.Add(int32(len(p))); return len(p), nil }
func (b *endless) Close() error               { b.closed.Add(1); return nil }

func TestABodyIsReadUpToFourKilobytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		body := &endless{}
		start(t, health.Options{Client: &engines{answer: func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 200, Body: body}, nil
		}}}, "p:1")
		assert.InDelta(t, 4<<10, body.read.Load(), 512)
		assert.EqualValues(t, 1, body.closed.Load())
	})
}

func TestConcurrencyIsALimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &engines{answer: hang}
		w := start(t, health.Options{Client: e, Concurrency: 10, Timeout: time.Second}, many(50)...)
		time.Sleep(15 * time.Second) // two rounds of 50 probes, ten at a time, a second each
		synctest.Wait()
		assert.Equal(t, int32(10), e.peak.Load())
		for id, phase := range w.phases() {
			assert.Equal(t, discovery.PhaseNotReady, phase, id)
		}
	})
}

func TestEndpointsComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &engines{answer: always(503)}
		w := start(t, health.Options{Client: e}, "a:1")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		require.Equal(t, discovery.PhaseNotReady, w.phases()["a:1"])

		w.Publish(endpoint(t, "b:1"))
		synctest.Wait()
		assert.Len(t, e.times("b:1"), 1, "one that joins is probed at once")
		n := len(e.times("a:1"))
		time.Sleep(10 * time.Second)
		assert.Len(t, e.times("a:1"), n, "one that left is not probed")

		e.set(always(200))
		w.Publish(endpoint(t, "a:1"))
		synctest.Wait()
		assert.Equal(t, discovery.PhaseReady, w.phases()["a:1"], "one that comes back starts as ready")

		draining := endpoint(t, "a:1")
		draining.Phase = discovery.PhaseDraining
		w.Publish(draining)
		synctest.Wait()
		n = len(e.times("a:1"))
		e.set(always(503))
		time.Sleep(10 * time.Second)
		assert.Len(t, e.times("a:1"), n, "one that drains is not probed")
		assert.Equal(t, discovery.PhaseDraining, w.phases()["a:1"])
	})
}

func TestAnEndpointWithANewAddressStartsAfresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &engines{answer: func(req *http.Request) (*http.Response, error) {
			if req.URL.Host == "old:1" {
				return hang(req)
			}
			return status(200), nil
		}}
		failures := 0
		observe := func(string, bool, error) { failures++ }
		w := start(t, health.Options{Client: e, Timeout: 3 * time.Second, Observe: observe}, "old:1")
		moved := endpoint(t, "new:1")
		moved.ID = "old:1"
		time.Sleep(5 * time.Second) // the second probe of the old address is under way
		w.Publish(moved)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		assert.Equal(t, map[string]discovery.Phase{"old:1": discovery.PhaseReady}, w.phases())
		assert.Equal(t, 1, failures, "the old address' late failure does not count")
		assert.GreaterOrEqual(t, len(e.times("new:1")), 9)
	})
}

func TestTheEndOfARunIsNobodysFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		observed := 0
		e := &engines{answer: hang}
		observe := func(string, bool, error) { observed++ }
		w := start(t, health.Options{Client: e, Failures: 1, Timeout: time.Hour, Observe: observe}, "p:1", "d:1")
		time.Sleep(time.Second)
		require.EqualValues(t, 2, e.flying.Load())
		before := maps.Clone(w.phases())
		w.cancel()
		synctest.Wait()
		assert.Zero(t, e.flying.Load(), "probes under way end with the run")
		assert.Zero(t, observed)
		assert.Equal(t, before, w.phases())
	})
}

func TestASecondRunIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set := discovery.NewSet()
		p := health.New(set, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx) }()
		synctest.Wait()
		require.Error(t, p.Run(ctx))
		cancel()
		require.NoError(t, <-done)
		require.NoError(t, p.Run(ctx), "but it may run again")
	})
}

// An engine that serves requests is asked every fourth time. One that fails is asked every time, whatever it serves.
func TestEnginesThatServeAreAskedLessOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &engines{answer: always(http.StatusOK)}
		w := start(t, health.Options{Interval: time.Second, Client: e}, "a:1", "b:1")
		busy := func(seconds int) (a, b int) {
			was, were := len(e.times("a:1")), len(e.times("b:1"))
			for range 10 * seconds {
				w.prober.Answered("a:1")
				w.prober.Answered("nobody")
				time.Sleep(100 * time.Millisecond)
			}
			return len(e.times("a:1")) - was, len(e.times("b:1")) - were
		}
		a, b := busy(40)
		assert.InDelta(t, 10, a, 2)
		assert.InDelta(t, 40, b, 3)
		e.set(always(http.StatusServiceUnavailable))
		a, _ = busy(40)
		assert.InDelta(t, 38, a, 3, "its probes fail")
	})
}
