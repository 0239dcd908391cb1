// SPDX-License-Identifier: Apache-2.0

package health

import (
	"container/heap"
	"context"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// A new endpoint's first probe follows the one before it by this much, so that a large set does not fire at once and
// a small one is known within milliseconds.
const firstGap = 2 * time.Millisecond

// idleWorkers is how many goroutines wait for work. More come when engines hang, and go when they are done.
const idleWorkers = 4

// target is one endpoint under probe.
type target struct {
	id      string
	url     *url.URL // the endpoint's, to notice a change
	request *http.Request

	due  time.Duration // since the run began; the schedule's
	seen uint64        // version of the last snapshot that had it; the schedule's
	gone atomic.Bool   // it has left the set: a late verdict is dropped

	answered atomic.Bool // requests since the last probe's turn: see Prober.Answered
	spared   int         // turns in a row without a probe; the schedule's

	busy                atomic.Bool // hands what follows from one worker to the next
	failures, successes int         // in a row
	down                bool
}

// run is one Run of a prober: a schedule, kept by one goroutine, and the workers it feeds.
type run struct {
	*Prober
	ctx     context.Context
	began   time.Time
	slack   time.Duration // a probe may be early by this much, to share a wake-up with the one before
	targets map[string]*target
	queue   queue

	work    chan *target
	workers sync.WaitGroup
	alive   atomic.Int32 // workers
	idle    atomic.Int32 // of them, those that wait for work
}

func newRun(ctx context.Context, p *Prober) *run {
	return &run{Prober: p, ctx: ctx, began: time.Now(), slack: min(p.o.Interval/100, 20*time.Millisecond),
		targets: map[string]*target{}, work: make(chan *target)}
}

// loop is the schedule: one goroutine, one timer.
func (r *run) loop() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var seen *discovery.Snapshot
	for {
		changed := r.set.Changed()
		if snap := r.set.Load(); snap != seen {
			r.follow(snap)
			seen = snap
		}
		timer.Reset(r.fire())
		select {
		case <-r.ctx.Done():
			return
		case <-changed:
		case <-timer.C:
		}
	}
}

// follow takes over the endpoints of a new snapshot.
func (r *run) follow(snap *discovery.Snapshot) {
	var fresh []*target
	for i := range snap.Endpoints {
		e := &snap.Endpoints[i]
		if e.Phase == discovery.PhaseDraining {
			continue
		}
		if t := r.targets[e.ID]; t != nil {
			if t.url == e.URL || *t.url == *e.URL {
				t.seen = snap.Version
				continue
			}
			t.gone.Store(true)
		}
		t := &target{id: e.ID, url: e.URL, seen: snap.Version, request: newRequest(e.URL, r.o.Path)}
		r.targets[e.ID] = t
		fresh = append(fresh, t)
	}
	for id, t := range r.targets {
		if t.seen != snap.Version {
			t.gone.Store(true)
			delete(r.targets, id)
		}
	}
	known := maps.Clone(r.targets)
	r.known.Store(&known)
	gap := firstGap
	if n := len(fresh); n > 0 {
		gap = min(gap, r.o.Interval/time.Duration(n))
	}
	now := time.Since(r.began)
	for i, t := range fresh {
		t.due = now + time.Duration(i)*gap
		heap.Push(&r.queue, t)
	}
}

// fire starts the probes that are due and returns how long nothing else is.
func (r *run) fire() time.Duration {
	for len(r.queue) > 0 {
		t, now := r.queue[0], time.Since(r.began)
		switch {
		case t.gone.Load():
			heap.Pop(&r.queue)
		case t.due > now+r.slack:
			return t.due - now
		case t.busy.Load(): // the last probe still hangs: look again soon after its timeout
			t.due = now + max(r.o.Interval/16, time.Millisecond)
			heap.Fix(&r.queue, 0)
		default:
			spread := rand.N(r.o.Interval/10 + 1) //nolint:gosec // it guards nothing
			t.due = max(t.due, now) + r.o.Interval - r.o.Interval/20 + spread
			heap.Fix(&r.queue, 0)
			if t.spare() {
				continue
			}
			if !r.start(t) {
				return time.Hour // the run is over
			}
		}
	}
	return time.Hour // nothing to probe: the next snapshot ends the wait
}

// maxSpared is how many turns in a row an engine that serves requests is not asked.
const maxSpared = 3

// spare reports whether t need not be asked this time. Nobody probes it now, so what its worker knows may be read.
func (t *target) spare() bool {
	if !t.answered.Swap(false) || t.failures > 0 || t.down || t.successes == 0 || t.spared == maxSpared {
		t.spared = 0
		return false
	}
	t.spared++
	return true
}

// start gives t to a worker that waits, or to a new one, or at the limit to the first that is done.
func (r *run) start(t *target) bool {
	t.busy.Store(true)
	select {
	case r.work <- t:
		return true
	default:
	}
	if int(r.alive.Load()) < r.o.Concurrency {
		r.alive.Add(1)
		r.workers.Go(func() { r.worker(t) })
		return true
	}
	select {
	case r.work <- t:
		return true
	case <-r.ctx.Done():
		return false
	}
}

func (r *run) worker(t *target) {
	defer r.alive.Add(-1)
	buf := make([]byte, 512)
	for open := true; open; {
		r.probe(t, buf)
		t.busy.Store(false)
		if r.idle.Add(1) > idleWorkers {
			r.idle.Add(-1)
			return
		}
		t, open = <-r.work
		r.idle.Add(-1)
	}
}

// wait ends the workers. The run's context has ended, and the probes under way with it.
func (r *run) wait() {
	close(r.work)
	r.workers.Wait()
}

// queue is a heap of targets by due time.
type queue []*target

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].due < q[j].due }
func (q queue) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }

// Push gets what heap.Push was given.
func (q *queue) Push(t any) { *q = append(*q, t.(*target)) } //nolint:errcheck // it is a target

// Pop forgets the target, so that it can be collected.
func (q *queue) Pop() any {
	old := *q
	t := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	return t
}
