// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"container/list"
	"sync"
	"sync/atomic"
	"time"
)

// rescuesAtOne is how many streams that are rescued a flow lets one engine prefill at a time. A decode engine may die
// with a thousand streams; all of them are rescued, but a request that comes meanwhile finds few of their prompts
// before its own. Four keep an engine busy: while it computes one prompt, the others are on their way.
const rescuesAtOne = 4

// rescueQueue are the rescues of a flow, by the ID of the engine that prefills.
type rescueQueue struct {
	mu sync.Mutex
	at map[string]*rescuesAt
}

// rescuesAt are those at one engine: those under way, and those that wait, first come first served.
type rescuesAt struct {
	taken   int
	waiting list.List // of chan bool, which gets true with a place, and false to pick again
	failed  int       // failures in a row
}

// rescuePlace is what a stream holds from its pick until the prefill leg has ended, or, where one engine serves alone,
// until its first event.
type rescuePlace struct {
	engine string
	free   atomic.Bool
}

// enter takes a place at an engine, or queues for one: then turn is not nil. leave or give must follow.
func (q *rescueQueue) enter(engine string) (turn *list.Element) {
	q.mu.Lock()
	defer q.mu.Unlock()
	at := q.at[engine]
	if at == nil {
		if q.at == nil {
			q.at = map[string]*rescuesAt{}
		}
		at = new(rescuesAt)
		q.at[engine] = at
	}
	if at.taken < rescuesAtOne {
		at.taken++
		return nil
	}
	return at.waiting.PushBack(make(chan bool, 1))
}

// leave ends the wait of one whose turn did not come, or came too late.
func (q *rescueQueue) leave(engine string, turn *list.Element) {
	q.mu.Lock()
	if at := q.at[engine]; at != nil {
		at.waiting.Remove(turn)
	}
	q.mu.Unlock()
	ch, _ := turn.Value.(chan bool)
	select {
	case placed := <-ch:
		if placed {
			q.give(&rescuePlace{engine: engine}, nil)
		}
	default:
	}
}

// give gives a place back, once, after a leg or an attempt that ended with e, or nil. p may be nil. When the engine has
// failed, and has failed two times in a row, four, eight …, all that wait for it pick again: at each failure they would
// pick far too often, and at the first alone the picker may not know enough yet.
func (q *rescueQueue) give(p *rescuePlace, e *Error) {
	if p == nil || p.free.Swap(true) {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	at := q.at[p.engine]
	at.taken--
	if e != nil && e.EngineFault() && e.Endpoint == p.engine {
		at.failed++
	} else {
		at.failed = 0
	}
	again := at.failed > 0 && at.failed&(at.failed-1) == 0
	for w := at.waiting.Front(); w != nil && (again || at.taken < rescuesAtOne); w = at.waiting.Front() {
		turn, _ := at.waiting.Remove(w).(chan bool)
		if !again {
			at.taken++
		}
		turn <- !again
	}
	if at.taken == 0 { // then nobody waits
		delete(q.at, p.engine)
	}
}

// rescuing reports whether the attempts of now are to go on with a stream.
func (x *exchange) rescuing() bool { return x.rescue != nil && x.rescue.from != nil }

// pickForRescue picks engines, and waits until the one that is to prefill has a place. The pick is held meanwhile, so
// that the picker knows what the engine will have to do. Another pick follows if the engine fails, or the list of
// engines has changed when the stream's turn comes.
func (x *exchange) pickForRescue(n int, mode Mode, p *Pick) (e *Error) {
	q, r := &x.f.rescues, x.rescue
	changing, _ := x.f.picker.(interface{ Changed() <-chan struct{} })
	for {
		if e = x.pick(x.ctx, n, mode, p); e != nil {
			return e
		}
		var changed <-chan struct{}
		if changing != nil {
			changed = changing.Changed()
		}
		engine, leg := p.Prefill.ID, x.f.limits.Prefill
		if p.Prefill.URL == nil {
			engine, leg = p.Decode.ID, x.f.limits.Decode
		}
		if r.place != nil && r.place.engine == engine && !r.place.free.Load() {
			return nil // its turn had come
		}
		q.give(r.place, nil)
		turn := q.enter(engine)
		placed := turn == nil
		if !placed {
			placed, e = x.awaitTurn(engine, turn, leg)
		}
		if placed {
			r.place = &rescuePlace{engine: engine}
			if turn == nil {
				return nil
			}
			select {
			case <-changed:
			default:
				return nil
			}
		}
		x.decline(p)
		if e != nil {
			return e
		}
	}
}

// awaitTurn waits until a stream has a place at an engine. It has none and no error if it is to pick again. All its
// waits together take no longer than a leg may take and a response may be silent, if both have limits: by then those
// of the streams that have places have let it try another engine.
func (x *exchange) awaitTurn(engine string, turn *list.Element, leg time.Duration) (placed bool, e *Error) {
	var tooLong <-chan time.Time
	if idle := x.f.limits.Idle; leg > 0 && idle > 0 {
		timer := time.NewTimer(leg + idle - time.Since(x.rescue.since))
		defer timer.Stop()
		tooLong = timer.C
	}
	ch, _ := turn.Value.(chan bool)
	select {
	case placed = <-ch:
		return placed, nil
	case <-tooLong:
		e = &Error{Code: CodeOverloaded, Phase: "rescue", Connector: x.f.name, RetryAfter: time.Second,
			Message: "more streams are to be rescued than the engines can prefill"}
	case <-x.ctx.Done():
		e = x.f.ended(x.ctx, "", "rescue")
	}
	x.f.rescues.leave(engine, turn)
	return false, e
}
