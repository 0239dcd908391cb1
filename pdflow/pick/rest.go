// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/pdflow"
)

// Engines rest after a request's fault: not so long that a pool shrinks for good, and never all of a role, since a picker
// uses resting engines when there are no others.
const (
	restFirst = time.Second
	restMost  = 8 * time.Second
)

type rests struct {
	n  atomic.Int64 // engines in the map: 0 in the common case, and then nothing is locked
	mu sync.RWMutex
	m  map[restKey]rest
}

// restKey is an engine, or a pair if decode is not "".
type restKey struct{ engine, decode string }

type rest struct {
	until  time.Time
	length time.Duration
}

// resting reports whether an engine rests now.
func (r *rests) resting(id string) bool { return r.rests(restKey{engine: id}) }

// pairResting reports whether two engines that are both well should not meet now.
func (r *rests) pairResting(prefill, decode string) bool { return r.rests(restKey{prefill, decode}) }

func (r *rests) rests(key restKey) bool {
	if r.n.Load() == 0 {
		return false
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	x, ok := r.m[key]
	return ok && time.Now().Before(x.until)
}

// done learns from an attempt: a fault of an engine lets it rest, and an orphan its pair, twice as long each time; an answer ends
// that.
func (r *rests) done(o *pdflow.Outcome) {
	if o.Err == nil {
		if r.n.Load() > 0 {
			r.forget(restKey{engine: o.Prefill.Endpoint}, restKey{engine: o.Decode.Endpoint}, restKey{o.Prefill.Endpoint, o.Decode.Endpoint})
		}
		return
	}
	if o.Orphan && o.Session != nil {
		r.rest(restKey{o.Session.Prefill.ID, o.Session.Decode.ID})
	}
	if o.Err.EngineFault() && o.Err.Endpoint != "" {
		r.rest(restKey{engine: o.Err.Endpoint})
	}
}

// rest lets an engine, or a pair, rest from now on.
func (r *rests) rest(key restKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.m == nil {
		r.m = map[restKey]rest{}
	}
	now := time.Now()
	r.sweep(now)
	x := r.m[key]
	if now.Before(x.until) {
		return // a burst of failures is one fault
	}
	x.length = min(max(2*x.length, restFirst), restMost)
	x.until = now.Add(x.length)
	r.m[key] = x
	r.n.Store(int64(len(r.m)))
}

// forget ends the rests of engines that have served, and those that are long over.
func (r *rests) forget(keys ...restKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, key := range keys {
		delete(r.m, key)
	}
	r.sweep(time.Now())
	r.n.Store(int64(len(r.m)))
}

// sweep drops what is of no use any more: engines that are gone leave nothing behind. r.mu is held.
func (r *rests) sweep(now time.Time) {
	for key, x := range r.m {
		if now.Sub(x.until) > restMost {
			delete(r.m, key)
		}
	}
}
