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
	m  map[string]rest
}

type rest struct {
	until  time.Time
	length time.Duration
}

// resting reports whether an engine rests now.
func (r *rests) resting(id string) bool {
	if r.n.Load() == 0 {
		return false
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	x, ok := r.m[id]
	return ok && time.Now().Before(x.until)
}

// pairResting reports whether two engines that are both well should not meet now.
func (r *rests) pairResting(prefill, decode string) bool {
	return r.n.Load() > 0 && r.resting(pairKey(prefill, decode))
}

// pairKey is no endpoint's ID.
func pairKey(prefill, decode string) string { return prefill + "\x00" + decode }

// done learns from an attempt: a fault of an engine lets it rest, and an orphan its pair, twice as long each time; an answer ends
// that.
func (r *rests) done(o *pdflow.Outcome) {
	if o.Err == nil {
		if r.n.Load() > 0 {
			r.forget(o.Prefill.Endpoint)
			r.forget(o.Decode.Endpoint)
			r.forget(pairKey(o.Prefill.Endpoint, o.Decode.Endpoint))
		}
		return
	}
	if o.Orphan {
		r.rest(pairKey(o.Session.Prefill.ID, o.Session.Decode.ID))
	}
	if o.Err.EngineFault() && o.Err.Endpoint != "" {
		r.rest(o.Err.Endpoint)
	}
}

// rest lets an engine, or a pair, rest from now on.
func (r *rests) rest(key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.m == nil {
		r.m = map[string]rest{}
	}
	now := time.Now()
	for id, x := range r.m { // engines that are gone leave nothing behind
		if now.Sub(x.until) > restMost {
			delete(r.m, id)
		}
	}
	x := r.m[key]
	if now.Before(x.until) {
		return // a burst of failures is one fault
	}
	x.length = min(max(2*x.length, restFirst), restMost)
	x.until = now.Add(x.length)
	r.m[key] = x
	r.n.Store(int64(len(r.m)))
}

func (r *rests) forget(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.m, id)
	r.n.Store(int64(len(r.m)))
}
