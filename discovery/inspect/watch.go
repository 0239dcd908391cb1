// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"container/heap"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

const (
	// firstRetry is the pause after a failed visit; it doubles up to the interval. So an engine that restarted is asked
	// again soon.
	firstRetry = time.Second
	// settle is how long the source collects responses for one snapshot, since many engines answer at nearly the same
	// time.
	settle = 20 * time.Millisecond
)

// watch is one running Watch. Its loop owns these fields; other goroutines run the inner source and the visits.
type watch struct {
	s       *Source
	ctx     context.Context
	publish func(discovery.Snapshot)
	running sync.WaitGroup

	lists   chan []discovery.Endpoint
	ended   chan error // of the wrapped source
	results chan result
	kick    chan struct{}
	askedMu sync.Mutex
	asked   map[string]struct{} // IDs given to Refresh that the loop has not handled yet

	list    []discovery.Endpoint // the inner source's last list
	targets map[string]*target
	queue   queue
	busy    int
	round   uint64
}

// target is the loop's state of one engine.
type target struct {
	e        discovery.Endpoint // as its list has it
	url      string
	fullAt   time.Time // when the next full visit is due
	loadAt   time.Time // when /metrics is due; zero: only with full visits
	failures int       // failed visits in a row
	round    uint64    // the number of the last list that had the engine
	place    int       // in the queue; -1 during a visit
	gone     bool      // it left the list during a visit
	again    bool      // a visit was requested during a visit
}

type result struct {
	t    *target
	full bool
	outcome
}

func newWatch(ctx context.Context, s *Source, publish func(discovery.Snapshot)) *watch {
	return &watch{s: s, ctx: ctx, publish: publish, lists: make(chan []discovery.Endpoint), ended: make(chan error, 1),
		results: make(chan result),
		kick:    make(chan struct{}, 1), asked: map[string]struct{}{}, targets: map[string]*target{}}
}

// watchInner runs the inner source. It turns a panic into an error: in this goroutine a panic would end the process.
func (w *watch) watchInner() {
	var err error
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
		w.ended <- err
	}()
	err = w.s.inner.Watch(w.ctx, func(snap discovery.Snapshot) {
		select {
		case w.lists <- snap.Endpoints:
		case <-w.ctx.Done():
		}
	})
}

func (w *watch) askFor(id string) {
	w.askedMu.Lock()
	w.asked[id] = struct{}{}
	w.askedMu.Unlock()
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

func (w *watch) loop() error {
	due, news := time.NewTimer(time.Hour), time.NewTimer(time.Hour)
	defer due.Stop()
	defer news.Stop()
	waiting := false // something has changed that is not published yet
	for {
		select {
		case <-w.ctx.Done():
			return nil
		case err := <-w.ended:
			return err
		case list := <-w.lists:
			w.follow(list)
			w.tell()
			waiting = false
		case r := <-w.results:
			if w.take(r) && !waiting {
				waiting = true
				news.Reset(settle)
			}
		case <-news.C:
			if waiting {
				waiting = false
				w.tell()
			}
		case <-w.kick:
			w.hurry()
		case <-due.C:
		}
		due.Reset(w.start())
	}
}

// follow replaces the list.
func (w *watch) follow(list []discovery.Endpoint) {
	w.list = list
	w.round++
	now := time.Now()
	listed := make(map[string]bool, len(list))
	for i := range list {
		e := &list[i]
		if listed[e.ID] || e.Validate() != nil {
			continue // the set uses the first endpoint of an ID, and reports the others
		}
		listed[e.ID] = true
		if e.Phase == discovery.PhaseDraining {
			continue // a draining engine gets no new requests
		}
		old, url := w.targets[e.ID], e.URL.String()
		if old != nil && old.url == url {
			woke := old.e.Phase != discovery.PhaseReady && e.Phase == discovery.PhaseReady
			old.e, old.round = *e, w.round
			if woke { // it may be another process
				w.soon(old, now)
			}
			continue
		}
		if old != nil {
			w.drop(old)
		}
		t := &target{e: *e, url: url, fullAt: now, round: w.round}
		if w.s.o.LoadInterval > 0 {
			t.loadAt = now
		}
		w.targets[e.ID] = t
		heap.Push(&w.queue, t)
	}
	for id, t := range w.targets {
		if t.round != w.round {
			w.drop(t)
			delete(w.targets, id)
		}
	}
	w.s.keep(listed) // draining engines too: requests that they still serve need their attributes
}

func (w *watch) drop(t *target) {
	t.gone = true
	if t.place >= 0 {
		heap.Remove(&w.queue, t.place)
	}
}

// soon makes an engine's visit due at once, or right after the visit that is running.
func (w *watch) soon(t *target, now time.Time) {
	if t.place < 0 {
		t.again = true
		return
	}
	t.fullAt = now
	heap.Fix(&w.queue, t.place)
}

func (w *watch) hurry() {
	w.askedMu.Lock()
	asked := w.asked
	w.asked = map[string]struct{}{}
	w.askedMu.Unlock()
	for id := range asked {
		if t := w.targets[id]; t != nil {
			w.soon(t, time.Now())
		}
	}
}

// start starts the visits that are due, and returns the time until the next one is due.
func (w *watch) start() time.Duration {
	for len(w.queue) > 0 && w.busy < w.s.o.Concurrency {
		t, now := w.queue[0], time.Now()
		if d := t.due().Sub(now); d > 0 {
			return d
		}
		heap.Pop(&w.queue)
		full := !t.fullAt.After(now)
		old, _ := w.s.of(t.e.ID, t.url)
		v := visit{s: w.s, e: t.e, old: old, full: full}
		w.busy++
		w.running.Go(func() {
			r := result{t: t, full: full, outcome: v.run(w.ctx)}
			select {
			case w.results <- r:
			case <-w.ctx.Done():
			}
		})
	}
	return time.Hour // the next result or list ends the wait
}

// take stores the result of a visit and reports whether the list must be published again.
func (w *watch) take(r result) (news bool) {
	w.busy--
	t, now, o := r.t, time.Now(), &w.s.o
	if t.gone {
		return false
	}
	old, had := w.s.of(t.e.ID, t.url)
	switch {
	case r.failed:
		t.failures++
		t.fullAt = now.Add(min(firstRetry<<min(t.failures-1, 20), o.Interval))
	case r.full:
		t.failures = 0
		t.fullAt = now.Add(jitter(o.Interval))
		w.s.learn(t.e.ID, t.url, r.reading)
		news = !had || !old.sameFacts(&r.reading)
	default:
		if old.Load = r.reading.Load; r.reading.listed {
			news = !slices.Equal(old.Adapters, r.reading.Adapters)
			old.Adapters = r.reading.Adapters
		}
		w.s.learn(t.e.ID, t.url, old)
	}
	if o.LoadInterval > 0 {
		t.loadAt = now.Add(jitter(o.LoadInterval))
		if r.failed { // a full visit finds out when the engine is back
			t.loadAt = t.fullAt
		}
	}
	if t.again || r.restarted {
		t.again, t.fullAt = false, now
	}
	heap.Push(&w.queue, t)
	return news
}

// jitter spreads visits that began at the same time.
func jitter(d time.Duration) time.Duration {
	return d - d/20 + rand.N(d/10+1) //nolint:gosec // spreads visits, guards nothing
}

// tell publishes the list with all known facts.
func (w *watch) tell() {
	endpoints := make([]discovery.Endpoint, len(w.list))
	for i := range w.list {
		endpoints[i] = w.list[i]
		e := &endpoints[i]
		if e.URL == nil {
			continue
		}
		if r, ok := w.s.of(e.ID, e.URL.String()); ok {
			r.fill(e)
		}
	}
	w.publish(discovery.Snapshot{Version: w.s.version.Add(1), Endpoints: endpoints})
}

func (t *target) due() time.Time {
	if !t.loadAt.IsZero() && t.loadAt.Before(t.fullAt) {
		return t.loadAt
	}
	return t.fullAt
}

// queue is a heap of targets by due time.
type queue []*target

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].due().Before(q[j].due()) }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

func (q *queue) Push(x any) {
	t := x.(*target) //nolint:errcheck // container/heap gives what it was given
	t.place = len(*q)
	*q = append(*q, t)
}

func (q *queue) Pop() any {
	old := *q
	t := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	t.place = -1
	return t
}
