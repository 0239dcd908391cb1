// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"container/list"
	"sync"
	"time"
)

// rescuesAtOne is how many streams that are rescued a flow lets one engine prefill at a time. A decode engine may die
// with a thousand streams; all of them are rescued, but a request that comes meanwhile finds few of their prompts
// before its own. Four keep an engine busy: while it computes one prompt, the others are on their way.
const rescuesAtOne = 4

// rescueQueue are the rescues of a flow: those under way, and those that wait for an engine, first come first served.
type rescueQueue struct {
	mu      sync.Mutex
	at      map[string]int // rescues under way, by the ID of the engine that prefills
	waiting list.List      // of chan struct{}, which gets a value when the first may try to pick
	none    time.Time      // when a rescue last found no engines, after it had waited for some
}

// enter queues a rescue. Its channel gets a value when it is the first, and then whenever a place becomes free. leave
// must follow.
func (q *rescueQueue) enter() (w *list.Element, first <-chan struct{}) {
	q.mu.Lock()
	defer q.mu.Unlock()
	ch := make(chan struct{}, 1)
	w = q.waiting.PushBack(ch)
	if w.Prev() == nil {
		q.wakeFirst()
	}
	return w, ch
}

func (q *rescueQueue) leave(w *list.Element) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting.Remove(w)
	q.wakeFirst()
}

// wakeFirst is called with the lock held.
func (q *rescueQueue) wakeFirst() {
	w := q.waiting.Front()
	if w == nil {
		return
	}
	first, _ := w.Value.(chan struct{})
	select {
	case first <- struct{}{}:
	default:
	}
}

// take takes a place at an engine, if one is free. release must follow then.
func (q *rescueQueue) take(engine string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.at[engine] >= rescuesAtOne {
		return false
	}
	if q.at == nil {
		q.at = map[string]int{}
	}
	q.at[engine]++
	return true
}

func (q *rescueQueue) release(engine string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.at[engine]--; q.at[engine] == 0 {
		delete(q.at, engine)
	}
	q.wakeFirst()
}

// full returns the engines that have no place.
func (q *rescueQueue) full() (ids []string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for id, n := range q.at {
		if n >= rescuesAtOne {
			ids = append(ids, id)
		}
	}
	return ids
}

// missed notes the error of a pick.
func (q *rescueQueue) missed(e *Error) {
	if e.Code == CodeNoEndpoint {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.none = time.Now()
	}
}

// noEngines reports whether another rescue has just waited in vain for engines. Else all that wait for each other would
// wait for engines one after the other.
func (q *rescueQueue) noEngines(just time.Duration) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return time.Since(q.none) < just
}

// rescuing reports whether the attempts of now are to go on with a stream.
func (x *exchange) rescuing() bool { return x.rescue != nil && x.rescue.from != nil }

// pickForRescue picks engines once the stream is the first that waits and the engine that is to prefill has a place.
// The stream holds the place until releasePlace. It waits no longer than a response may be silent.
func (x *exchange) pickForRescue(n int, mode Mode, p *Pick) *Error {
	q := &x.f.rescues
	w, first := q.enter()
	defer q.leave(w)
	var tooLong <-chan time.Time
	if limit := x.f.limits.Idle; limit > 0 {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		tooLong = timer.C
	}
	for {
		select {
		case <-first:
		case <-tooLong:
			return &Error{Code: CodeOverloaded, Phase: "rescue", Connector: x.f.name, RetryAfter: time.Second,
				Message: "more streams are to be rescued than the engines can prefill"}
		case <-x.ctx.Done():
		}
		if x.ctx.Err() != nil { // looked at here, since select takes any of what is ready
			return x.f.ended(x.ctx, "", "rescue")
		}
		if e := x.pick(x.ctx, n, mode, p); e != nil {
			q.missed(e)
			return e
		}
		prefills := p.Prefill.ID
		if p.Prefill.URL == nil {
			prefills = p.Decode.ID
		}
		if q.take(prefills) {
			x.rescue.placed, x.rescue.place = true, prefills
			return nil
		}
		x.decline(p)
	}
}

// releasePlace gives back what pickForRescue took.
func (x *exchange) releasePlace() {
	if r := x.rescue; r != nil && r.placed {
		r.placed = false
		x.f.rescues.release(r.place)
	}
}
