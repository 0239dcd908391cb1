// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Options are the settings of [New]. Zero values mean the defaults.
type Options struct {
	// Adaptive finds the limits by measuring. PrefillLimit and DecodeLimit are then the most that it may find.
	Adaptive bool

	PrefillLimit int // requests in flight at one prefill engine, until its leg has ended; 0: no limit
	DecodeLimit  int // requests in flight at one decode engine, until the response's end; 0: no limit

	// Queue is how many requests may wait; default [DefaultQueue]; negative: none. Those that wait for an engine that
	// they name ([pdflow.PickInput]) are counted for each such engine by itself, and take nobody else's place.
	Queue        int
	QueueTimeout time.Duration // how long one may wait; default [DefaultQueueTimeout]

	// Priority returns a request's priority. Of those that wait the one with the least goes first, as vLLM schedules by
	// priority, and of equal ones who came first. In a full queue a request takes the place of the last one, which is
	// refused, if that has a greater priority. Nil: all are equal. See [PriorityHeader].
	Priority func(in *pdflow.PickInput) int

	// Load says how busy an engine is, by its ID: see [inspect.Source.Reading]. A decode engine whose KV cache is full
	// gets no request while others run there. Adaptive limits the engine to what it runs without a queue of its own.
	// Nil, or a Load whose At is zero, says nothing. The picker calls Load under its lock: Load must be quick, and must
	// not call the picker.
	Load func(id string) inspect.Load

	MeterProvider metric.MeterProvider // nil: no metrics
	Attributes    []attribute.KeyValue // of all metrics
}

// What holds where Options leave it open.
const (
	DefaultQueue        = 256
	DefaultQueueTimeout = 10 * time.Second
)

const (
	kvFull          = 0.95                  // of the KV cache: vLLM begins to preempt requests when nothing is left
	pollLoad        = 50 * time.Millisecond // an engine's load changes without an event
	stale           = 5 * time.Second       // an older load says nothing any more
	leastRetryAfter = time.Second
)

// Picker is a [pdflow.Picker] that admits requests. Make it with [New]. It is ready whenever the inner picker is: an
// overloaded fleet is ready.
type Picker struct {
	inner
	asks bool // the inner picker prepares
	*admission
}

// inner is the picker that is asked.
type inner = pick.Around

// admission is what all pickers share that were bound from one: requests of all their flows are in the same queue, and
// count at the same engines.
type admission struct {
	o   Options
	tel *telemetry

	mu      sync.Mutex
	engines map[string]*engine
	crowded int // engines that are at a limit
	queue   queue
	// means of a prefill leg's seconds at an engine that is not crowded, and of their squares
	service, squares average
}

// New puts limits around a picker. Flows that are given the same Picker share its limits and its queue.
//
// The limits hold one lock while they call the inner picker's Pick, and the Done of a pick that they give back because
// its engines are full. Both must be quick, since all other requests wait for the lock, and must not call the Picker
// that New returns: such a call would never return. An inner picker that has to ask somebody is a [pdflow.Preparer]: it
// does so before the lock, once for all tries.
func New(p pdflow.Picker, o *Options) (*Picker, error) {
	if p == nil {
		return nil, errors.New("admit: New needs a picker")
	}
	if o == nil {
		o = &Options{}
	}
	a := &admission{o: *o, engines: map[string]*engine{}}
	if a.o.PrefillLimit < 0 || a.o.DecodeLimit < 0 || a.o.QueueTimeout < 0 {
		return nil, errors.New("admit: a limit and a timeout must not be negative")
	}
	a.o.Queue, a.o.QueueTimeout = cmp.Or(a.o.Queue, DefaultQueue), cmp.Or(a.o.QueueTimeout, DefaultQueueTimeout)
	var err error
	a.tel, err = newTelemetry(a)
	return a.around(p), err
}

// Bind binds the inner picker. The limits are the same for all flows.
func (p *Picker) Bind(c connector.KVConnector, serving connector.Serving) pdflow.Picker {
	return p.around(p.inner.Bind(c, serving))
}

func (a *admission) around(p pdflow.Picker) *Picker {
	_, asks := p.(pdflow.Preparer)
	return &Picker{pick.NewAround(p), asks, a}
}

// Close ends the picker's metrics.
func (p *Picker) Close() error { return p.tel.close() }

// Queued returns how many requests wait.
func (p *Picker) Queued() int { return p.queued() }

func (a *admission) queued() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.queue.len()
}

// State is what a [Picker] does now, for operators.
type State struct {
	Queued  int              // requests that wait
	Refused map[string]int64 // requests refused since New, by reason: queue_full, wait, timeout (docs/metrics.md)
	Engines []EngineState    // those that have had requests, in no order
}

// EngineState is one engine in its two roles.
type EngineState struct {
	ID              string
	Prefill, Decode Occupancy
}

// Occupancy is how much of an engine is in use in one role.
type Occupancy struct {
	InFlight int // requests
	Limit    int // requests; 0: no limit
}

// State returns what the picker does now. It is safe for concurrent use.
func (p *Picker) State() State {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := State{Queued: p.queue.len(), Refused: map[string]int64{}, Engines: make([]EngineState, 0, len(p.engines))}
	for reason, n := range p.tel.refusals {
		s.Refused[reason] = n.Load()
	}
	for _, e := range p.engines {
		s.Engines = append(s.Engines, EngineState{ID: e.id,
			Prefill: Occupancy{e.inFlight[prefillRole], int(e.limits[prefillRole].limit)},
			Decode:  Occupancy{e.inFlight[decodeRole], int(e.limits[decodeRole].limit)}})
	}
	return s
}

// Pick picks engines that have room for the request, and waits for them if there are none. A request's further attempts
// do not wait: the request has been admitted.
func (p *Picker) Pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	in, err := p.prepare(ctx, in)
	if err != nil {
		return pdflow.Pick{}, err
	}
	pick, w, err := p.arrive(ctx, in)
	if w == nil {
		return pick, err
	}
	return p.wait(ctx, in, w)
}

// prepare has the inner picker prepare, before the lock, unless the request is refused anyway.
func (p *Picker) prepare(ctx context.Context, in *pdflow.PickInput) (*pdflow.PickInput, error) {
	if !p.asks {
		return in, nil
	}
	if err := p.early(ctx, in); err != nil {
		return nil, err
	}
	return p.Prepare(ctx, in), nil
}

// early refuses a request that would have to wait and must not.
func (p *Picker) early(ctx context.Context, in *pdflow.PickInput) error {
	priority := p.priority(in)
	p.mu.Lock()
	defer p.mu.Unlock()
	if in.Attempt > 1 || p.next() == nil {
		return nil
	}
	_, _, err := p.place(ctx, in, priority)
	return err
}

// arrive picks at once if nobody waits and engines have room. Otherwise it queues the request, or refuses it.
func (p *Picker) arrive(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, *waiter, error) {
	priority := p.priority(in)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.next() == nil || in.Attempt > 1 {
		if pick, ok, err := p.try(ctx, in); ok || err != nil {
			return pick, nil, err
		}
	}
	w, loses, err := p.place(ctx, in, priority)
	if err != nil {
		return pdflow.Pick{}, nil, err
	}
	if loses != nil {
		p.queue.drop(loses)
	}
	return pdflow.Pick{}, p.queue.add(w), nil
}

func (p *Picker) priority(in *pdflow.PickInput) int {
	if p.o.Priority == nil {
		return 0
	}
	return p.o.Priority(in)
}

// place finds a request's place in the queue, and which other request loses its own, or refuses it. The caller holds
// p.mu.
func (p *Picker) place(ctx context.Context, in *pdflow.PickInput, priority int) (w, loses *waiter, err error) {
	named := [2]string{prefillRole: in.Prefill, decodeRole: in.Decode}
	if in.Single {
		named[prefillRole] = ""
	}
	rivals, ahead, last := p.rivals(named, priority)
	if ahead >= p.o.Queue {
		return nil, nil, p.refused(ctx, reasonFull)
	}
	over := p.over()
	if reason := p.refusal(ahead + over); reason != "" {
		return nil, nil, p.refused(ctx, reason)
	}
	if rivals >= p.o.Queue {
		loses = last
	}
	return &waiter{priority: priority, places: over + ahead + 1, named: named}, loses, nil
}

// try picks, and takes the places at the engines. It returns false if there is no room. The caller holds p.mu.
func (p *Picker) try(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, bool, error) {
	pick, err := p.inner.Pick(ctx, p.without(*in))
	if err != nil {
		return pick, false, err
	}
	if in.Attempt > 1 || p.hasRoom(&pick) {
		return p.take(pick), true, nil
	}
	if pick.Done != nil { // give the pick back
		pick.Done(&pdflow.Outcome{Err: &pdflow.Error{Code: pdflow.CodeOverloaded, Phase: "pick"}})
	}
	return pdflow.Pick{}, false, nil
}

// wait waits until it is this request's turn and an engine has room.
func (p *Picker) wait(ctx context.Context, in *pdflow.PickInput, w *waiter) (pdflow.Pick, error) {
	defer p.leave(w) // also when the inner picker panics
	timeout := time.NewTimer(p.o.QueueTimeout)
	defer timeout.Stop()
	var poll <-chan time.Time
	if p.o.Load != nil {
		ticker := time.NewTicker(pollLoad)
		defer ticker.Stop()
		poll = ticker.C
	}
	for {
		changed := p.Changed() // before the try, so that no change is missed
		if pick, ok, err := p.turn(ctx, in, w); ok || err != nil {
			return pick, err
		}
		select {
		case <-w.wake:
		case <-changed:
		case <-poll:
		case <-timeout.C:
			return pdflow.Pick{}, p.timedOut(ctx)
		case <-ctx.Done():
			return pdflow.Pick{}, ctx.Err()
		}
	}
}

// next returns the first request of the queue whose engines have room, where it names any: requests that must wait for
// one engine do not hold up those that others can serve. Nil: there is none. The caller holds a.mu.
func (a *admission) next() *waiter {
	for at := a.queue.l.Front(); at != nil; at = at.Next() {
		if w := waiterAt(at); !a.waitsForNamed(w, [2]string{}) {
			return w
		}
	}
	return nil
}

// waitsForNamed reports whether an engine that a request names has no room, but for those that another one names, too.
func (a *admission) waitsForNamed(w *waiter, but [2]string) bool {
	for role, id := range w.named {
		if e := a.engines[id]; id != "" && id != but[role] && e != nil && a.full(e, role) {
			return true
		}
	}
	return false
}

// rivals returns how many requests wait for what one that arrives would wait for, how many of them are ahead of it, and
// the last of them. Those that wait for a full engine which they name, and this one does not, take no place of its own.
// The caller holds a.mu.
func (a *admission) rivals(named [2]string, priority int) (all, ahead int, last *waiter) {
	for at := a.queue.l.Front(); at != nil; at = at.Next() {
		w := waiterAt(at)
		if a.waitsForNamed(w, named) {
			continue
		}
		if all, last = all+1, w; w.priority <= priority {
			ahead++
		}
	}
	return all, ahead, last
}

func (a *admission) wakeNext() {
	if w := a.next(); w != nil {
		w.rouse()
	}
}

func (a *admission) timedOut(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.refused(ctx, reasonTimeout)
}

// turn tries to pick if it is the request's turn.
func (p *Picker) turn(ctx context.Context, in *pdflow.PickInput, w *waiter) (pdflow.Pick, bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if w.dropped {
		return pdflow.Pick{}, false, p.refused(ctx, reasonFull)
	}
	if p.next() != w {
		p.wakeNext() // it may have become another's turn because this one's engine has no room
		return pdflow.Pick{}, false, nil
	}
	pick, ok, err := p.try(ctx, in)
	if ok {
		if w.named == [2]string{} { // else its wait tells of one engine
			p.queue.granted(w)
		}
		p.tel.waited(ctx, time.Since(w.since))
	}
	return pick, ok, err
}

// leave takes a request out of the queue, and lets the next one try.
func (a *admission) leave(w *waiter) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.queue.remove(w)
	a.wakeNext()
}

// refused returns the error of a request that is refused. The caller holds a.mu.
func (a *admission) refused(ctx context.Context, reason string) error {
	a.tel.refused(ctx, reason)
	return &pdflow.Error{Code: pdflow.CodeOverloaded, Phase: "pick", RetryAfter: a.retryAfter(),
		Message: "more requests than the engines can serve; try again later"}
}
