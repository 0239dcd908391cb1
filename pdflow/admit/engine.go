// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

const (
	prefillRole = iota
	decodeRole
)

// engine is what is known of one engine.
type engine struct {
	id       string
	inFlight [2]int // by role
	limits   [2]limiter
	crowded  bool      // at a limit
	load     time.Time // of the last load that was looked at
	used     time.Time
}

// forgetAfter is after how long without requests what was learnt of an engine may be forgotten.
const forgetAfter = 10 * time.Minute

func (a *admission) engine(id string) *engine {
	e := a.engines[id]
	if e != nil {
		return e
	}
	now := time.Now()
	for old, x := range a.engines { // engines come and go under new IDs
		if x.inFlight == [2]int{} && now.Sub(x.used) > forgetAfter {
			a.mark(x, false)
			delete(a.engines, old)
		}
	}
	e = &engine{id: id, limits: [2]limiter{newLimiter(a.o.Adaptive, a.o.PrefillLimit, firstPrefill),
		newLimiter(a.o.Adaptive, a.o.DecodeLimit, firstDecode)}}
	a.engines[id] = e
	return e
}

func (a *admission) mark(e *engine, crowded bool) {
	switch {
	case crowded == e.crowded:
		return
	case crowded:
		a.crowded++
	default:
		a.crowded--
	}
	e.crowded = crowded
}

// full reports whether an engine has no room for one more request in a role.
func (a *admission) full(e *engine, role int) bool {
	l, n := &e.limits[role], e.inFlight[role]
	if role == decodeRole && n > 0 && a.o.Load != nil {
		load := a.o.Load(e.id)
		fresh := time.Since(load.At) < stale
		if fresh && load.KVUsage >= kvFull {
			return true
		}
		if a.o.Adaptive && fresh && load.At.After(e.load) {
			e.load = load.At
			l.told(n, load.Running, load.Queued())
		}
	}
	return l.limit > 0 && float64(n) >= l.limit
}

// atLimit updates whether an engine is at a limit.
func (a *admission) atLimit(e *engine) bool {
	a.mark(e, a.full(e, prefillRole) || a.full(e, decodeRole))
	return e.crowded
}

// without adds the engines that are at a limit to those that a pick avoids. It tells the picker which these are: it
// must not send to an engine in a cooldown what the others have no room for.
func (a *admission) without(in pdflow.PickInput) *pdflow.PickInput {
	if a.crowded == 0 {
		return &in
	}
	all := append(make([]string, 0, len(in.Avoid)+a.crowded), in.Avoid...)
	for _, e := range a.engines {
		if e.crowded && a.atLimit(e) && !in.Avoids(e.id) {
			all = append(all, e.id)
			for role := range e.limits {
				e.limits[role].reached = e.limits[role].reached || a.full(e, role)
			}
		}
	}
	in.Full, in.Avoid = all[len(in.Avoid):], all
	return &in
}

// hasRoom reports whether both engines of a pick have room. If not, it notes which has not.
func (a *admission) hasRoom(pick *pdflow.Pick) bool {
	room := true
	for role, ep := range [2]*discovery.Endpoint{&pick.Prefill, &pick.Decode} {
		if ep.URL == nil {
			continue
		}
		if e := a.engine(ep.ID); a.full(e, role) {
			a.mark(e, true)
			e.limits[role].reached, room = true, false
		}
	}
	return room
}

// place is what one attempt holds.
type place struct {
	a       *admission
	engines [2]*engine
	crowd   [2]int // requests in flight when it came, itself included
	open    [2]atomic.Bool
	pick    pdflow.Pick
}

// take counts the attempt at the engines of its pick until its legs end.
func (a *admission) take(pick pdflow.Pick) pdflow.Pick {
	x := &place{a: a, pick: pick}
	for role, ep := range [2]*discovery.Endpoint{&pick.Prefill, &pick.Decode} {
		if ep.URL == nil {
			continue
		}
		e := a.engine(ep.ID)
		e.inFlight[role]++
		x.engines[role], x.crowd[role] = e, e.inFlight[role]
		x.open[role].Store(true)
		a.atLimit(e)
	}
	pick.PrefillDone, pick.Done = x.prefillDone, x.done
	return pick
}

func (x *place) prefillDone(o *pdflow.LegOutcome) {
	var s *sample
	if o != nil && o.Err == nil {
		s = &sample{took: o.Duration().Seconds()}
	}
	defer x.release(prefillRole, s) // also when the inner picker panics
	if x.pick.PrefillDone != nil {
		x.pick.PrefillDone(o)
	}
}

func (x *place) done(o *pdflow.Outcome) {
	defer x.release(decodeRole, sampled(o)) // also when the inner picker panics
	defer x.release(prefillRole, nil)       // where the leg was never begun
	if x.pick.Done != nil {
		x.pick.Done(o)
	}
}

// sampled is what an attempt tells of its decode engine, nil if that is nothing.
func sampled(o *pdflow.Outcome) *sample {
	d := &o.Decode
	if o.Err != nil || d.FirstByte.IsZero() || d.End.IsZero() {
		return nil
	}
	s := &sample{took: d.FirstByte.Sub(d.Start).Seconds(), rest: d.End.Sub(d.FirstByte).Seconds()}
	if o.Session == nil || o.Session.Request == nil || !o.Session.Request.Stream {
		s.kind, s.rest = whole, 0 // the first byte comes after the last token
		s.took /= float64(max(o.Usage.Output, 1))
	}
	return s
}

// release gives a place back. It learns from s unless that is nil.
func (x *place) release(role int, s *sample) {
	if !x.open[role].CompareAndSwap(true, false) {
		return
	}
	a, e := x.a, x.engines[role]
	a.mu.Lock()
	defer a.mu.Unlock()
	e.inFlight[role]--
	e.used = time.Now()
	if s != nil && a.o.Adaptive && (role == prefillRole || e.load.IsZero()) {
		s.crowd = x.crowd[role]
		if uncrowded := e.limits[role].learn(*s); uncrowded && role == prefillRole {
			a.service.add(s.took, 64)
			a.squares.add(s.took*s.took, 64)
		}
	}
	a.atLimit(e)
	a.wakeNext()
}
