// SPDX-License-Identifier: Apache-2.0

package discovery_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
)

func endpoint(t testing.TB, id string, change ...func(*discovery.Endpoint)) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New("http://"+id+":8000", discovery.RoleBoth)
	require.NoError(t, err)
	e.ID = id
	for _, f := range change {
		f(&e)
	}
	return e
}

func zone(z string) func(*discovery.Endpoint) { return func(e *discovery.Endpoint) { e.Zone = z } }
func phase(p discovery.Phase) func(*discovery.Endpoint) {
	return func(e *discovery.Endpoint) { e.Phase = p }
}
func role(r discovery.Role) func(*discovery.Endpoint) {
	return func(e *discovery.Endpoint) { e.Role = r }
}

// faults is what a set reported.
type faults struct {
	mu   sync.Mutex
	list []string
}

func (f *faults) add(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = append(f.list, err.Error())
}

func (f *faults) all() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.list...)
}

// run runs a set until the test ends.
func run(t testing.TB, sources ...discovery.Source) (*discovery.Set, *faults) {
	t.Helper()
	set, f := discovery.NewSet(sources...), &faults{}
	set.OnError(f.add)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- set.Run(ctx) }()
	t.Cleanup(func() { cancel(); assert.NoError(t, <-done) })
	return set, f
}

// say writes a snapshot as its endpoints' id:zone:phase.
func say(s *discovery.Snapshot) []string {
	out := []string{}
	for _, e := range s.Endpoints {
		out = append(out, fmt.Sprintf("%s:%s:%s", e.ID, e.Zone, e.Phase))
	}
	return out
}

// publish lets a source publish a list, and the set take it in.
func publish(m *discoverytest.Manual, list ...discovery.Endpoint) {
	m.Publish(list...)
	synctest.Wait()
}

func TestBeforeAnySourceHasSpoken(t *testing.T) {
	set := discovery.NewSet(discoverytest.NewManual())
	require.NotNil(t, set.Load())
	assert.Zero(t, set.Load().Version)
	assert.Empty(t, set.Load().Endpoints)
}

func TestMerge(t *testing.T) {
	type lists = [][]discovery.Endpoint
	for name, c := range map[string]struct {
		sources lists
		want    []string
	}{
		"endpoints keep the order of sources and of their lists": {
			lists{{endpoint(t, "b"), endpoint(t, "a")}, {endpoint(t, "d"), endpoint(t, "c")}},
			[]string{"b::ready", "a::ready", "d::ready", "c::ready"}},
		"an ID belongs to the earliest source, whole": {
			lists{{endpoint(t, "a", phase(discovery.PhaseDraining))},
				{endpoint(t, "a", zone("second")), endpoint(t, "b")}},
			[]string{"a::draining", "b::ready"}},
		"two IDs with one URL are two endpoints": {
			lists{{endpoint(t, "a", func(e *discovery.Endpoint) { e.ID = "x" })},
				{endpoint(t, "a", func(e *discovery.Endpoint) { e.ID = "y" })}},
			[]string{"x::ready", "y::ready"}},
		"within one list the first of an ID stays": {
			lists{{endpoint(t, "a", zone("first")), endpoint(t, "a", zone("second")), endpoint(t, "b")}},
			[]string{"a:first:ready", "b::ready"}},
		"an unusable endpoint is left out, the others stay": {
			lists{
				{{ID: "no-url", Role: discovery.RoleBoth}, endpoint(t, "no-role", role(0)),
					endpoint(t, "no-id", func(e *discovery.Endpoint) { e.ID = "" }), endpoint(t, "a")},
			},
			[]string{"a::ready"}},
		"an unusable endpoint does not hide a later source's": {
			lists{{{ID: "a"}}, {endpoint(t, "a", zone("second"))}},
			[]string{"a:second:ready"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var sources []discovery.Source
				for _, list := range c.sources {
					m := discoverytest.NewManual()
					m.Publish(list...)
					sources = append(sources, m)
				}
				set, _ := run(t, sources...)
				synctest.Wait()
				assert.Equal(t, c.want, say(set.Load()))
			})
		})
	}
}

func TestALaterSourceShowsWhenTheEarlierDropsTheID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := discoverytest.NewManual(), discoverytest.NewManual()
		set, f := run(t, first, second)
		publish(first, endpoint(t, "a", zone("first")))
		publish(second, endpoint(t, "a", zone("second")))
		require.Equal(t, []string{"a:first:ready"}, say(set.Load()))
		publish(first)
		assert.Equal(t, []string{"a:second:ready"}, say(set.Load()))
		assert.Empty(t, f.all(), "overlapping sources are no fault")
	})
}

func TestWhatIsLeftOutIsReportedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := discoverytest.NewManual()
		set, f := run(t, m)
		publish(m, endpoint(t, "a"), endpoint(t, "a"), discovery.Endpoint{ID: "b"})
		publish(m, endpoint(t, "a"), endpoint(t, "a"), discovery.Endpoint{ID: "b"}, endpoint(t, "c"))
		assert.Equal(t, []string{`discovery source 0: left out: endpoint "a" is listed twice, and 1 more`}, f.all())
		assert.Equal(t, []string{"a::ready", "c::ready"}, say(set.Load()))
		m.Publish(endpoint(t, "a"))
		publish(m, endpoint(t, "a"), endpoint(t, "a"))
		assert.Equal(t, `discovery source 0: left out: endpoint "a" is listed twice`, f.all()[1],
			"and again when it comes back")
	})
}

func TestTheSameListAgainIsNoNewVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := discoverytest.NewManual()
		set, _ := run(t, m)
		labelled := func(e *discovery.Endpoint) { e.Attributes = map[string]string{"k": "v"} }
		publish(m, endpoint(t, "a", labelled), endpoint(t, "b"))
		before := set.Load()
		publish(m, endpoint(t, "a", labelled), endpoint(t, "b")) // other pointers, same meaning
		assert.Same(t, before, set.Load())
		for name, change := range map[string]func(*discovery.Endpoint){
			"role": role(discovery.RoleDecode), "phase": phase(discovery.PhaseNotReady), "zone": zone("z"),
			"group":      func(e *discovery.Endpoint) { e.Group = "g" },
			"node":       func(e *discovery.Endpoint) { e.Node = "n" },
			"model":      func(e *discovery.Endpoint) { e.Model = "m" },
			"version":    func(e *discovery.Endpoint) { e.Version = "v" },
			"url":        func(e *discovery.Endpoint) { e.URL.Host = "elsewhere:1" },
			"scheme":     func(e *discovery.Endpoint) { e.URL.Scheme = "https" },
			"path":       func(e *discovery.Endpoint) { e.URL.Path = "/base" },
			"attributes": func(e *discovery.Endpoint) { e.Attributes = map[string]string{"k": "w"} },
		} {
			publish(m, endpoint(t, "a", labelled), endpoint(t, "b"))
			before, changed := set.Load(), set.Changed()
			publish(m, endpoint(t, "a", labelled, change), endpoint(t, "b"))
			assert.Equal(t, before.Version+1, set.Load().Version, name)
			select {
			case <-changed:
			default:
				assert.Fail(t, "Changed was not closed", name)
			}
		}
	})
}

func TestAnEmptyFirstListIsAVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := discoverytest.NewManual()
		set, _ := run(t, m)
		publish(m)
		assert.EqualValues(t, 1, set.Load().Version)
	})
}

func TestVerdictsOfProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := discoverytest.NewManual()
		set, _ := run(t, m)
		publish(m, endpoint(t, "a"), endpoint(t, "b"), endpoint(t, "c", phase(discovery.PhaseDraining)))
		first := set.Load()

		set.SetHealthy("a", true)
		set.SetHealthy("c", false)
		set.SetHealthy("nobody", false)
		assert.Same(t, first, set.Load(), "a verdict that changes nothing publishes nothing")

		set.SetHealthy("a", false)
		second := set.Load()
		assert.Equal(t, []string{"a::not-ready", "b::ready", "c::draining"}, say(second))
		assert.Equal(t, []string{"a::ready", "b::ready", "c::draining"}, say(first),
			"a published snapshot stays as it was")
		set.SetHealthy("a", false)
		assert.Same(t, second, set.Load())

		publish(m, endpoint(t, "b"), endpoint(t, "a", zone("z")))
		assert.Equal(t, []string{"b::ready", "a:z:not-ready"}, say(set.Load()),
			"a verdict outlives the source's changes")

		set.SetHealthy("a", true)
		assert.Equal(t, []string{"b::ready", "a:z:ready"}, say(set.Load()))

		set.SetHealthy("a", false)
		m.Publish(endpoint(t, "b"))
		publish(m, endpoint(t, "b"), endpoint(t, "a"))
		assert.Equal(t, []string{"b::ready", "a::ready"}, say(set.Load()), "forgotten when the endpoint leaves")

		set.SetHealthy("a", false)
		publish(m, endpoint(t, "b"), endpoint(t, "a", func(e *discovery.Endpoint) { e.URL.Host = "moved:1" }))
		assert.Equal(t, []string{"b::ready", "a::ready"}, say(set.Load()), "forgotten with another address")
	})
}

// What is fresh saves a probe to whoever wants to know how an engine is.
func TestAVerdictHasATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := discoverytest.NewManual()
		set, _ := run(t, m)
		publish(m, endpoint(t, "a"))
		is := func(healthy bool, age time.Duration) {
			t.Helper()
			h, at := set.Healthy("a")
			assert.Equal(t, healthy, h)
			assert.Equal(t, age, time.Since(at))
		}
		healthy, at := set.Healthy("a")
		assert.True(t, !healthy && at.IsZero(), "nobody has probed it")
		set.SetHealthy("a", true)
		time.Sleep(time.Second)
		is(true, time.Second)
		set.SetHealthy("a", true)
		is(true, 0)
		set.SetHealthy("a", false)
		time.Sleep(time.Second)
		is(false, time.Second)
		publish(m, endpoint(t, "a", zone("z")))
		is(false, time.Second)
		publish(m, endpoint(t, "a", func(e *discovery.Endpoint) { e.URL.Host = "moved:1" }))
		healthy, at = set.Healthy("a")
		assert.True(t, !healthy && at.IsZero(), "of another address")
		set.SetHealthy("nobody", true)
		_, at = set.Healthy("nobody")
		assert.True(t, at.IsZero())
	})
}

func TestAFailedSourceKeepsItsListAndIsWatchedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := discoverytest.NewManual()
		set, f := run(t, m)
		publish(m, endpoint(t, "a"))
		m.Fail(errors.New("backend down"))
		synctest.Wait()
		assert.Equal(t, []string{"a::ready"}, say(set.Load()))
		assert.Equal(t, []string{"discovery source 0: backend down"}, f.all())
		publish(m, endpoint(t, "a"), endpoint(t, "b"))
		assert.Len(t, set.Load().Endpoints, 1, "there is a pause")
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		assert.Len(t, set.Load().Endpoints, 2)
	})
}

func TestFailuresDoNotReachOtherSources(t *testing.T) {
	for name, c := range map[string]struct {
		watch func(ctx context.Context, publish func(discovery.Snapshot)) error
		want  string
	}{
		"an error": {func(context.Context, func(discovery.Snapshot)) error { return errors.New("down") },
			"down"},
		"nil, too early": {func(context.Context, func(discovery.Snapshot)) error { return nil },
			"ended before its context"},
		"a panic": {func(context.Context, func(discovery.Snapshot)) error { panic("boom") }, "panic: boom"},
		"a foreign context": {func(context.Context, func(discovery.Snapshot)) error { return context.Canceled },
			"context canceled"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, calls := discoverytest.NewManual(), []time.Time{}
				set, f := run(
					t, discovery.SourceFunc(func(ctx context.Context, publish func(discovery.Snapshot)) error {
						calls = append(calls, time.Now())
						return c.watch(ctx, publish)
					}), m)
				m.Publish(endpoint(t, "a"))
				time.Sleep(time.Minute)
				synctest.Wait()
				assert.Equal(t, []string{"a::ready"}, say(set.Load()))
				require.Len(t, f.all(), len(calls))
				assert.Equal(t, "discovery source 0: "+c.want, f.all()[0])
				nominal := 100 * time.Millisecond
				for i := range calls[1:] {
					pause := calls[i+1].Sub(calls[i])
					assert.GreaterOrEqual(t, pause, nominal/2, "pause %d", i)
					assert.LessOrEqual(t, pause, nominal, "pause %d", i)
					nominal = min(2*nominal, 10*time.Second)
				}
			})
		})
	}
}

func TestTheFirstPauseComesBackAfterALongWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls []time.Time
		run(t, discovery.SourceFunc(func(ctx context.Context, _ func(discovery.Snapshot)) error {
			calls = append(calls, time.Now())
			if len(calls) == 10 {
				time.Sleep(time.Minute)
			}
			return errors.New("down")
		}))
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		assert.Greater(t, calls[9].Sub(calls[8]), 4*time.Second)
		assert.LessOrEqual(t, calls[10].Sub(calls[9]), time.Minute+100*time.Millisecond)
	})
}

func TestASnapshotAfterTheReturnIsIgnoredAndReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var late func(discovery.Snapshot)
		set, f := run(t, discovery.SourceFunc(func(ctx context.Context, publish func(discovery.Snapshot)) error {
			if late != nil {
				<-ctx.Done()
				return nil
			}
			late = publish
			return errors.New("down")
		}))
		synctest.Wait()
		late(discovery.Snapshot{Version: 1, Endpoints: []discovery.Endpoint{endpoint(t, "a")}})
		assert.Zero(t, set.Load().Version)
		assert.Equal(
			t, []string{"discovery source 0: down", "discovery source 0: published after its Watch had " +
				"returned; ignored"}, f.all(),
		)
	})
}

func TestRunEndsWithItsContextAndGoesOnLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := discoverytest.NewManual()
		set := discovery.NewSet(m)
		m.Publish(endpoint(t, "a"))
		for range 2 {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- set.Run(ctx) }()
			synctest.Wait()
			require.Error(t, set.Run(ctx), "one at a time")
			cancel()
			require.NoError(t, <-done)
		}
		assert.EqualValues(t, 1, set.Load().Version)
		assert.Equal(t, []string{"a::ready"}, say(set.Load()))
	})
}

func TestRunWithoutSourcesWaitsForItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ended atomic.Bool
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() { _ = discovery.NewSet().Run(ctx); ended.Store(true) }()
		synctest.Wait()
		assert.False(t, ended.Load())
		cancel()
		synctest.Wait()
		assert.True(t, ended.Load())
	})
}

func TestWaitReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := discoverytest.NewManual()
		set, _ := run(t, m)
		two := func(s *discovery.Snapshot) bool { return len(s.Endpoints) == 2 }
		time.AfterFunc(time.Second, func() { m.Publish(endpoint(t, "a")) })
		time.AfterFunc(2*time.Second, func() { m.Publish(endpoint(t, "a"), endpoint(t, "b")) })
		began := time.Now()
		require.NoError(t, set.WaitReady(t.Context(), two))
		assert.Equal(t, 2*time.Second, time.Since(began))
		require.NoError(t, set.WaitReady(t.Context(), two), "at once when it holds already")

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorIs(t, set.WaitReady(ctx, func(*discovery.Snapshot) bool { return false }),
			context.DeadlineExceeded)
	})
}

func TestChangesSkipWhatASlowReaderMissed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := discoverytest.NewManual()
		set, _ := run(t, m)
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var versions []uint64
		for snap := range set.Changes(ctx) {
			versions = append(versions, snap.Version)
			switch snap.Version {
			case 0:
				for i := range 5 {
					m.Publish(endpoint(t, fmt.Sprint("e", i)))
				}
				synctest.Wait() // the reader is slow
			case 5:
				go m.Publish()
			default:
				cancel()
			}
		}
		assert.Equal(t, []uint64{0, 5, 6}, versions)
	})
}

func TestAnUnusableEndpointIsReportedThoughAnEarlierSourceHasItsID(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := discoverytest.NewManual(), discoverytest.NewManual()
		set, f := run(t, first, second)
		publish(first, endpoint(t, "a"))
		publish(second, discovery.Endpoint{ID: "a"})
		assert.Equal(t, []string{"a::ready"}, say(set.Load()))
		assert.Equal(t, []string{`discovery source 1: left out: endpoint "a" has no URL`}, f.all())
	})
}

func TestASetKeepsItsOwnListOfSources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := discoverytest.NewManual()
		sources := []discovery.Source{m}
		set := discovery.NewSet(sources...)
		sources[0] = nil
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- set.Run(ctx) }()
		publish(m, endpoint(t, "a"))
		assert.Len(t, set.Load().Endpoints, 1)
		cancel()
		require.NoError(t, <-done)
	})
}

// When Run has returned, no source is at work, and what a source returned at the end is no failure of it.
func TestRunWaitsForItsSources(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, ended := &faults{}, atomic.Bool{}
		set := discovery.NewSet(discovery.SourceFunc(func(ctx context.Context, publish func(discovery.Snapshot)) error {
			<-ctx.Done()
			time.Sleep(time.Second) // it has something to close
			publish(discovery.Snapshot{Endpoints: []discovery.Endpoint{endpoint(t, "a")}})
			ended.Store(true)
			return errors.New("the end")
		}))
		set.OnError(f.add)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		require.NoError(t, set.Run(ctx))
		assert.True(t, ended.Load())
		assert.Len(t, set.Load().Endpoints, 1)
		assert.Empty(t, f.all())
	})
}

// A snapshot that is published while Watch returns is in the set before the next Watch begins, or not at all: it cannot
// replace what that one publishes.
func TestASnapshotNeverReplacesThatOfALaterWatch(t *testing.T) {
	inside, release, again := make(chan struct{}), make(chan struct{}), make(chan struct{})
	calls := 0
	set, publishing := discovery.NewSet(
		discovery.SourceFunc(func(ctx context.Context, publish func(discovery.Snapshot)) error {
			if calls++; calls == 1 {
				go publish(discovery.Snapshot{Endpoints: []discovery.Endpoint{endpoint(t, "old"), endpoint(t, "old")}})
				<-inside
				return errors.New("down")
			}
			close(again)
			publish(discovery.Snapshot{Endpoints: []discovery.Endpoint{endpoint(t, "new")}})
			<-ctx.Done()
			return nil
		})), sync.OnceFunc(func() { close(inside); <-release })
	set.OnError(func(error) { publishing() }) // of the endpoint that is listed twice: an observer that is slow
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- set.Run(ctx) }()
	<-inside
	select {
	case <-again:
		assert.Fail(t, "the next Watch has begun")
	case <-time.After(300 * time.Millisecond): // three times the pause between two
	}
	close(release)
	<-again
	require.NoError(t, set.WaitReady(t.Context(), func(s *discovery.Snapshot) bool {
		return assert.ObjectsAreEqual([]string{"new::ready"}, say(s))
	}))
	cancel()
	require.NoError(t, <-done)
}

func TestChangesAreNoneWhenTheContextHasEnded(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range discovery.NewSet().Changes(ctx) {
		assert.Fail(t, "yielded")
	}
}

func TestASourceIsNotBlamedForAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := discoverytest.NewManual(), discoverytest.NewManual()
		set, f := run(t, first, second)
		publish(first, endpoint(t, "a"), discovery.Endpoint{ID: "b"})
		publish(second, endpoint(t, "c"))
		assert.Equal(t, []string{"a::ready", "c::ready"}, say(set.Load()))
		assert.Equal(t, []string{`discovery source 0: left out: endpoint "b" has no URL`}, f.all())
	})
}
