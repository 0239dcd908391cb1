// SPDX-License-Identifier: Apache-2.0

package discoverytest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// trial checks one rule of one source. It watches the source as a set does, and keeps all that the source publishes.
type trial struct {
	Harness
	parent context.Context
	ctx    context.Context // for the calls of Watch
	cancel context.CancelFunc
	source discovery.Source

	mu        sync.Mutex
	published []record
	news      chan struct{} // closed at the next publication
	inside    atomic.Int32  // running calls of publish
	crowded   atomic.Bool   // two calls of publish ran at once
	left      []*watching   // running calls of Watch, for end to stop
}

// record is a published snapshot, and a copy of its endpoints at that time.
type record struct {
	snap discovery.Snapshot
	then []discovery.Endpoint
}

// watching is one call of Watch.
type watching struct {
	returned chan struct{} // closed when Watch has returned
	err      error         // what it returned; read after returned
}

func newTrial(ctx context.Context, h Harness) *trial {
	t := &trial{Harness: h, parent: ctx, news: make(chan struct{}), source: h.New()}
	t.ctx, t.cancel = context.WithCancel(ctx)
	return t
}

// watch calls the source's Watch. A panic becomes an error.
func (t *trial) watch(ctx context.Context) *watching {
	w := &watching{returned: make(chan struct{})}
	t.left = append(t.left, w)
	go func() {
		defer close(w.returned)
		defer func() {
			if v := recover(); v != nil {
				w.err = fmt.Errorf("panic: %v", v)
			}
		}()
		w.err = t.source.Watch(ctx, t.publish)
	}()
	return w
}

func (t *trial) publish(snap discovery.Snapshot) {
	if t.inside.Add(1) > 1 {
		t.crowded.Store(true)
	}
	defer t.inside.Add(-1)
	time.Sleep(time.Millisecond) // so that a second caller has time to come in
	t.mu.Lock()
	defer t.mu.Unlock()
	t.published = append(t.published, record{snap, deepCopy(snap.Endpoints)})
	close(t.news)
	t.news = make(chan struct{})
}

// end stops all calls of Watch and returns the faults that every rule checks.
func (t *trial) end() error {
	t.cancel()
	for _, w := range t.left {
		if err := t.await(w); err != nil {
			return err
		}
	}
	if t.crowded.Load() {
		return errors.New("publish was called by two goroutines at once")
	}
	return nil
}

// await waits until a Watch returns whose context has ended.
func (t *trial) await(w *watching) error {
	timeout := time.NewTimer(t.Timeout)
	defer timeout.Stop()
	select {
	case <-w.returned:
		return nil
	case <-timeout.C:
		return fmt.Errorf("Watch has not returned %v after the end of its context", t.Timeout)
	}
}

// all returns what was published so far.
func (t *trial) all() []record {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.published)
}

// until waits until ok holds for the publications from number from on.
func (t *trial) until(from int, what string, ok func([]record) bool) error {
	timeout := time.NewTimer(t.Timeout)
	defer timeout.Stop()
	for {
		t.mu.Lock()
		have, news := t.published[from:], t.news
		t.mu.Unlock()
		if ok(have) {
			return nil
		}
		select {
		case <-news:
		case <-timeout.C:
			return fmt.Errorf("after %v: %s", t.Timeout, what)
		case <-t.parent.Done():
			return t.parent.Err()
		}
	}
}

// first waits for the first publication from number from on.
func (t *trial) first(from int) error {
	return t.until(from, "no snapshot was published", func(r []record) bool { return len(r) > 0 })
}

// settle waits for the harness's Settle time, or until w returns.
func (t *trial) settle(w *watching) {
	pause := time.NewTimer(t.Settle)
	defer pause.Stop()
	select {
	case <-pause.C:
	case <-w.returned:
	case <-t.parent.Done():
	}
}

func deepCopy(endpoints []discovery.Endpoint) []discovery.Endpoint {
	c := slices.Clone(endpoints)
	for i := range c {
		if c[i].URL != nil {
			u := *c[i].URL
			c[i].URL = &u
		}
		c[i].Attributes = maps.Clone(c[i].Attributes)
	}
	return c
}

// ids returns the phases of a list's endpoints by ID.
func ids(endpoints []discovery.Endpoint) map[string]discovery.Phase {
	m := make(map[string]discovery.Phase, len(endpoints))
	for _, e := range endpoints {
		m[e.ID] = e.Phase
	}
	return m
}
