// SPDX-License-Identifier: Apache-2.0

package discoverytest_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
)

func endpoint(t testing.TB, id string) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New("http://"+id, discovery.RoleBoth)
	require.NoError(t, err)
	e.Attributes = map[string]string{"port": "1"}
	return e
}

type (
	manual      = discoverytest.Manual
	publishFunc = func(discovery.Snapshot)
	watchFunc   = func(src *manual, ctx context.Context, publish publishFunc) error
)

// backend is what the harness of these tests drives: a Manual source, whose Watch a test may replace by a wrong one.
type backend struct {
	src  *manual
	list []discovery.Endpoint
	made int
}

// harness makes sources that go wrong in the way of wrong. wrong(nil) is the right one.
func harness(t *testing.T, wrong watchFunc) discoverytest.Harness {
	b := &backend{}
	return discoverytest.Harness{
		New: func() discovery.Source {
			src := discoverytest.NewManual()
			b.src = src
			b.list = []discovery.Endpoint{endpoint(t, "a:1"), endpoint(t, "b:1")}
			b.src.Publish(b.list...)
			if wrong == nil {
				return src
			}
			return discovery.SourceFunc(func(ctx context.Context, publish publishFunc) error {
				return wrong(src, ctx, publish)
			})
		},
		Change: func() error {
			b.made++
			b.list = append(b.list, endpoint(t, fmt.Sprintf("new%d:1", b.made)))
			b.src.Publish(b.list...)
			return nil
		},
		Break:  func() error { b.src.Fail(errors.New("backend down")); return nil },
		Repair: func() error { return nil },
		Remove: func() (string, error) {
			gone := b.list[0]
			gone.Phase = discovery.PhaseDraining
			b.src.Publish(append([]discovery.Endpoint{gone}, b.list[1:]...)...)
			b.list = b.list[1:]
			b.src.Publish(b.list...)
			return gone.ID, nil
		},
		Settle: 40 * time.Millisecond,
	}
}

func TestManualKeepsTheRules(t *testing.T) {
	h := harness(t, nil)
	discoverytest.Run(t, h)
	require.NoError(t, discoverytest.Check(t.Context(), h))
}

// altered is a source whose snapshots pass through f.
func altered(f func(snap *discovery.Snapshot)) watchFunc {
	return func(src *manual, ctx context.Context, publish publishFunc) error {
		return src.Watch(ctx, func(snap discovery.Snapshot) {
			snap.Endpoints = append([]discovery.Endpoint(nil), snap.Endpoints...)
			f(&snap)
			publish(snap)
		})
	}
}

func TestEveryBrokenRuleIsReported(t *testing.T) {
	stubborn := func() { time.Sleep(time.Hour) } // outlives the suite's patience; fake time ends it
	for name, c := range map[string]struct {
		wrong  watchFunc
		report string
	}{
		"returns while its context lives": {func(src *manual, ctx context.Context, publish publishFunc) error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			_ = src.Watch(ctx, publish)
			return nil
		}, "watch blocks until its context ends: Watch returned (<nil>)"},
		"panics": {func(*manual, context.Context, publishFunc) error {
			panic("boom")
		}, "watch returns when its context has ended already: Watch returned panic: boom"},
		"returns another error at the end": {func(src *manual, ctx context.Context, publish publishFunc) error {
			_ = src.Watch(ctx, publish)
			return errors.New("closed")
		}, "watch returns nil or the context's error: Watch returned closed"},
		"ignores its context": {func(src *manual, ctx context.Context, publish publishFunc) error {
			_ = src.Watch(ctx, publish)
			stubborn()
			return nil
		}, "watch returns nil or the context's error: Watch has not returned"},
		"ignores a context that has ended before": {func(src *manual, ctx context.Context, publish publishFunc) error {
			if ctx.Err() != nil {
				stubborn()
			}
			return src.Watch(ctx, publish)
		}, "watch returns when its context has ended already: Watch has not returned"},
		"works once only": {func() watchFunc {
			var used atomic.Pointer[discoverytest.Manual]
			return func(src *manual, ctx context.Context, publish publishFunc) error {
				if used.Swap(src) == src {
					<-ctx.Done()
					return nil
				}
				return src.Watch(ctx, publish)
			}
		}(), "a source can be watched again: the second Watch: after"},
		"publishes nothing": {func(_ *manual, ctx context.Context, _ publishFunc) error {
			<-ctx.Done()
			return nil
		}, "rule 1: the first snapshot comes by itself: after 5s: no snapshot was published"},
		"lists an id twice": {altered(func(snap *discovery.Snapshot) {
			snap.Endpoints = append(snap.Endpoints, snap.Endpoints[0])
		}), `rule 2: endpoints are valid and their ids unique: version 1 lists "a:1" twice`},
		"lists an endpoint without a URL": {altered(func(snap *discovery.Snapshot) {
			snap.Endpoints[0].URL = nil
		}), `rule 2: endpoints are valid and their ids unique: version 1: endpoint "a:1" has no URL`},
		"never counts": {altered(func(snap *discovery.Snapshot) {
			snap.Version = 7
		}), "rule 2: versions rise with each change: version 7 was followed by version 7"},
		"misses changes": {altered(func(snap *discovery.Snapshot) {
			snap.Endpoints = snap.Endpoints[:1]
		}), "rule 2: versions rise with each change: after 5s: the change was not published"},
		"empties its list on an error": {func(src *manual, ctx context.Context, publish publishFunc) error {
			err := src.Watch(ctx, publish)
			if ctx.Err() == nil {
				publish(discovery.Snapshot{Version: 99})
			}
			return err
		}, `rule 3: an error keeps the last good snapshot: version 99 lost`},
		"never comes back from an error": {func(src *manual, ctx context.Context, publish publishFunc) error {
			if err := src.Watch(ctx, publish); ctx.Err() != nil {
				return err
			}
			<-ctx.Done()
			return nil
		}, "rule 3: an error keeps the last good snapshot: after the repair: after 5s: the change was not " +
			"published"},
		"removes without draining": {altered(func(snap *discovery.Snapshot) {
			for i := range snap.Endpoints {
				snap.Endpoints[i].Phase = discovery.PhaseReady
			}
		}), `rule 4: draining comes before removal: "a:1" left the list without having been draining`},
		"never removes": {func(src *manual, ctx context.Context, publish publishFunc) error {
			return src.Watch(ctx, func(snap discovery.Snapshot) {
				if snap.Endpoints[0].ID == "a:1" {
					publish(snap)
				}
			})
		}, `rule 4: draining comes before removal: after 5s: "a:1" is still on the list`},
		"publishes after the return": {func(src *manual, ctx context.Context, publish publishFunc) error {
			err := src.Watch(ctx, publish)
			time.AfterFunc(5*time.Millisecond, func() { publish(discovery.Snapshot{Version: 99}) })
			return err
		}, "rule 5: nothing is published after the return: 1 snapshots were published"},
		"uses one slice again": {func(src *manual, ctx context.Context, publish publishFunc) error {
			var own [16]discovery.Endpoint
			return src.Watch(ctx, func(snap discovery.Snapshot) {
				n := copy(own[:], snap.Endpoints)
				own[0].Zone = fmt.Sprint(snap.Version)
				publish(discovery.Snapshot{Version: snap.Version, Endpoints: own[:n]})
			})
		}, "a published snapshot is never altered: version 1 was altered"},
		"alters its attributes": {func(src *manual, ctx context.Context, publish publishFunc) error {
			return src.Watch(ctx, func(snap discovery.Snapshot) {
				publish(snap)
				snap.Endpoints[0].Attributes["port"] += "1"
			})
		}, "a published snapshot is never altered: version 1 was altered"},
		"publishes from two goroutines": {func(src *manual, ctx context.Context, publish publishFunc) error {
			done := make(chan struct{})
			go func() { defer close(done); _ = src.Watch(ctx, publish) }()
			err := src.Watch(ctx, publish)
			<-done
			return err
		}, "rule 1: the first snapshot comes by itself: publish was called by two goroutines at once"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				err := discoverytest.Check(t.Context(), harness(t, c.wrong))
				require.Error(t, err)
				assert.Contains(t, err.Error(), c.report)
				time.Sleep(2 * time.Hour) // the stubborn end too
			})
		})
	}
}

func TestAbilitiesAreOptional(t *testing.T) {
	h := harness(t, nil)
	require.NoError(t, discoverytest.Check(t.Context(), discoverytest.Harness{New: h.New, Settle: time.Millisecond}))
}

func TestAFaultOfTheHarnessIsSaid(t *testing.T) {
	broken := errors.New("cannot")
	for name, spoil := range map[string]func(h *discoverytest.Harness){
		"New":    func(h *discoverytest.Harness) { h.New = nil },
		"Change": func(h *discoverytest.Harness) { h.Change = func() error { return broken } },
		"Break":  func(h *discoverytest.Harness) { h.Break = func() error { return broken } },
		"Repair": func(h *discoverytest.Harness) { h.Repair = func() error { return broken } },
		"Remove": func(h *discoverytest.Harness) { h.Remove = func() (string, error) { return "", broken } },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := harness(t, nil)
				spoil(&h)
				err := discoverytest.Check(t.Context(), h)
				require.Error(t, err)
				assert.Contains(t, err.Error(), "the harness")
				assert.Contains(t, err.Error(), name)
			})
		})
	}
}

func TestCheckEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	h := harness(t, nil)
	require.ErrorIs(t, discoverytest.Check(ctx, h), context.Canceled)
}
