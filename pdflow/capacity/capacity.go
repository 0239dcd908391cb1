// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"cmp"
	"sync"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
)

// Options are a [Meter]'s settings. A zero means the default.
type Options struct {
	Window time.Duration // over which rates are taken; default 1 minute
	Stale  time.Duration // after which what an engine said counts no more; default 1 minute

	// Target is the share of its speed, and of its KV memory, that an engine is to use: what is above it is the room
	// for bursts and for an engine that fails. Default 0.65 of prefill engines, at which prompts arrive at random and
	// queue, and 0.85 of others.
	Target float64
	// Drain is how long the backlog may take. Default 30 s.
	Drain time.Duration
	// Down is for how long fewer engines must be wanted before Wanted falls. Default 10 minutes: an engine takes
	// minutes to load its model.
	Down time.Duration
	// Tolerance is the share of the engines by which they may differ from what is wanted without a change. Default 0.1,
	// as of Kubernetes' HorizontalPodAutoscaler.
	Tolerance float64

	// Speed is what one engine of each role serves at most, in tokens a second: prompt tokens computed and tokens made.
	// A role without an entry learns it from engines in which requests wait.
	Speed map[discovery.Role]float64
}

// Reason says why so many engines are wanted.
type Reason string

// The reasons, by what asks for most.
const (
	Unknown    Reason = "unknown"    // no engine has said how busy it is: as many as there are
	Throughput Reason = "throughput" // the tokens that come, at Target
	Backlog    Reason = "backlog"    // also those that wait, within Drain
	Memory     Reason = "memory"     // KV, at Target
	Waiting    Reason = "waiting"    // requests wait, and what an engine serves is not known yet: one more
	Tolerated  Reason = "tolerated"  // as many as there are, within Tolerance
	Held       Reason = "held"       // more were wanted within Down
)

// Role is what the engines of one role say together.
type Role struct {
	Engines int // that are not draining
	Told    int // of these, that have said how busy they are, within Stale

	Running, Waiting int        // requests; one that fetches KV waits for no engine
	KVUsage          float64    // of the fullest engine, 0 to 1
	Held             inspect.KV // Memory and Disk
	// Counted is what all engines of the role have counted since they were first observed, also those that are gone. It
	// only rises.
	Counted inspect.KV

	Throughput float64 // tokens a second, over Window: prompt tokens computed, and tokens made
	Speed      float64 // tokens a second of one engine that has all it can do; 0: not known yet
	Backlog    float64 // tokens of the requests that wait in the engines, by what requests took within Window
	Saturation float64 // the larger of Throughput's share of all engines' speed, and of the mean KV usage; may pass 1

	Wanted int // engines
	Reason Reason
}

// Meter measures the engines of one model. Its methods may be called concurrently.
type Meter struct {
	o Options

	mu      sync.Mutex
	engines map[string]*engine
	roles   map[discovery.Role]*role
}

// engine is what is known of one engine.
type engine struct {
	last    inspect.KV
	at      time.Time // of last
	samples []sample  // those of the window, the oldest first

}

// sample is what an engine said at one time.
type sample struct {
	at               time.Time
	tokens, requests float64 // since its start
	busy             bool    // requests wait in it
}

type role struct {
	counted inspect.KV
	speed   float64
	wanted  []wish // of the last Down, each more than those after it

}

type wish struct {
	at time.Time
	n  int
}

// New returns a meter of engines that have said nothing. A nil o means the defaults.
func New(o *Options) *Meter {
	m := &Meter{engines: map[string]*engine{}, roles: map[discovery.Role]*role{}}
	if o != nil {
		m.o = *o
	}
	m.o.Window = cmp.Or(m.o.Window, time.Minute)
	m.o.Stale = cmp.Or(m.o.Stale, time.Minute)
	m.o.Drain = cmp.Or(m.o.Drain, 30*time.Second)
	m.o.Down = cmp.Or(m.o.Down, 10*time.Minute)
	m.o.Tolerance = cmp.Or(m.o.Tolerance, 0.1)
	return m
}

// Observe takes what the engines have said, and returns what it means, by role. reading is that of an [inspect.Source],
// which asks for [inspect.Metrics]. It may be called at any pace; rates are taken between the times at which engines
// were asked, so that several readers, and several gateways, come to the same figures.
func (m *Meter) Observe(now time.Time, engines []discovery.Endpoint,
	reading func(id string) (inspect.Reading, bool)) map[discovery.Role]Role {
	m.mu.Lock()
	defer m.mu.Unlock()
	sums := map[discovery.Role]*sum{}
	for r, known := range m.roles { // a role whose engines are all gone keeps what they counted
		sums[r] = &sum{Role: Role{Counted: known.counted}}
	}
	listed := make(map[string]bool, len(engines))
	for i := range engines {
		e := &engines[i]
		listed[e.ID] = true
		if m.roles[e.Role] == nil {
			m.roles[e.Role] = &role{}
		}
		if sums[e.Role] == nil {
			sums[e.Role] = &sum{}
		}
		s := sums[e.Role]
		if e.Phase != discovery.PhaseDraining {
			s.Engines++
		}
		if e.Phase == discovery.PhaseReady {
			s.ready++
		}
		if r, ok := reading(e.ID); ok && !r.Load.At.IsZero() {
			m.take(now, e, &r.Load, s)
		}
		s.Counted = m.roles[e.Role].counted
	}
	for id := range m.engines {
		if !listed[id] {
			delete(m.engines, id)
		}
	}
	out := make(map[discovery.Role]Role, len(sums))
	for r, s := range sums {
		m.judge(now, r, s)
		out[r] = s.Role
	}
	return out
}

// sum adds up the engines of a role.
type sum struct {
	Role
	ready    int     // engines that serve; others are loading the model, and take no load yet
	usage    float64 // of all that told
	requests float64 // a second, that ended
}

// take adds one engine's word to its role's.
func (m *Meter) take(now time.Time, e *discovery.Endpoint, load *inspect.Load, s *sum) {
	r := m.roles[e.Role]
	known := m.engines[e.ID]
	if known != nil {
		if known.at.Sub(now) > m.o.Stale { // the clock has gone back: what comes now is no older word
			known.at, known.samples = time.Time{}, known.samples[:0]
		}
		filled := *load
		load = &filled
		complete(&load.KV, &known.last)
	}
	switch {
	case known != nil && !load.At.After(known.at): // known, or older: several may have asked the engine
	case known == nil: // what it counted before is not this meter's to tell
		known = &engine{}
		m.engines[e.ID] = known
	case restarted(&load.KV, &known.last):
		add(&r.counted, &load.KV, &inspect.KV{})
		known.samples = known.samples[:0]
	default:
		add(&r.counted, &load.KV, &known.last)
	}
	if load.At.After(known.at) {
		known.last, known.at = load.KV, load.At
	}
	known.sample(load, m.o.Window, r)
	if e.Phase == discovery.PhaseDraining || now.Sub(load.At) > m.o.Stale {
		return
	}
	s.Told++
	s.Running += load.Running
	s.Waiting += load.Queued()
	s.KVUsage = max(s.KVUsage, load.KVUsage)
	s.usage += load.KVUsage
	s.Held.Memory += load.KV.Memory
	s.Held.Disk += load.KV.Disk
	tokens, requests := known.rates()
	s.Throughput += tokens
	s.requests += requests
}

// sample remembers what the engine says, and what it served if it had all that it could do.
func (e *engine) sample(load *inspect.Load, window time.Duration, r *role) {
	now := sample{load.At, load.KV.Computed + load.KV.Generated, load.KV.Requests,
		load.Queued() > 0 && load.Queued()*10 >= load.Running}
	if n := len(e.samples); n > 0 {
		before := &e.samples[n-1]
		if !now.at.After(before.at) {
			return
		}
		if served := now.tokens - before.tokens; before.busy && now.busy && served > 0 {
			r.learn(served / now.at.Sub(before.at).Seconds())
		}
	}
	e.samples = append(e.samples, now)
	for len(e.samples) > 2 && now.at.Sub(e.samples[1].at) >= window {
		e.samples = append(e.samples[:0], e.samples[1:]...)
	}
}

// rates are the tokens and the requests a second, over the samples.
func (e *engine) rates() (tokens, requests float64) {
	n := len(e.samples)
	if n < 2 {
		return 0, 0
	}
	first, last := &e.samples[0], &e.samples[n-1]
	seconds := last.at.Sub(first.at).Seconds()
	return (last.tokens - first.tokens) / seconds, (last.requests - first.requests) / seconds
}

// learn takes in what one busy engine served in a second. Prompts differ, so one measurement weighs an eighth.
func (r *role) learn(speed float64) {
	if r.speed == 0 {
		r.speed = speed
	}
	r.speed += (speed - r.speed) / 8
}

// complete fills in what an engine did not say this time, as it was: else it would look restarted, and all that it has
// ever counted would come anew with its next word. An engine that was restarted counts less of everything.
func complete(now, before *inspect.KV) {
	missing, goesOn := false, false
	for _, x := range pairs(now, before) {
		missing = missing || *x[0] == 0 && *x[1] > 0
		goesOn = goesOn || *x[0] >= *x[1] && *x[1] > 0
	}
	for _, x := range pairs(now, before) {
		if missing && goesOn && *x[0] == 0 {
			*x[0] = *x[1]
		}
	}
}

// pairs are the counters of both.
func pairs(a, b *inspect.KV) [8][2]*float64 {
	return [8][2]*float64{{&a.Taken, &b.Taken}, {&a.Computed, &b.Computed}, {&a.Generated, &b.Generated},
		{&a.Requests, &b.Requests}, {&a.Bytes, &b.Bytes}, {&a.Seconds, &b.Seconds}, {&a.Failed, &b.Failed},
		{&a.Expired, &b.Expired}}
}

// restarted reports whether an engine counts less than it did.
func restarted(now, before *inspect.KV) bool {
	for _, x := range pairs(now, before) {
		if *x[0] < *x[1] {
			return true
		}
	}
	return false
}

// add adds what was counted since before.
func add(total, now, before *inspect.KV) {
	all, since := pairs(total, total), pairs(now, before)
	for i := range all {
		*all[i][0] += *since[i][0] - *since[i][1]
	}
}
