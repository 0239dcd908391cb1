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

// rescueQueue are the rescues of a flow, by the ID of the engine that prefills.
type rescueQueue struct {
	mu sync.Mutex
	at map[string]*rescuesAt
}

// rescuesAt are those at one engine: those under way, and those that wait, first come first served.
type rescuesAt struct {
	taken   int
	waiting list.List // of chan bool, which gets true with a place, and false to pick again
}

// enter takes a place at an engine, or queues for one: then turn is not nil. leave or release must follow.
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
			q.release(engine, false)
		}
	default:
	}
}

// release gives a place back. If the engine failed, nobody goes on to wait for it.
func (q *rescueQueue) release(engine string, failed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	at := q.at[engine]
	at.taken--
	for w := at.waiting.Front(); w != nil && (failed || at.taken < rescuesAtOne); w = at.waiting.Front() {
		turn, _ := at.waiting.Remove(w).(chan bool)
		if !failed {
			at.taken++
		}
		turn <- !failed
	}
	if at.taken == 0 { // then nobody waits
		delete(q.at, engine)
	}
}

// rescuing reports whether the attempts of now are to go on with a stream.
func (x *exchange) rescuing() bool { return x.rescue != nil && x.rescue.from != nil }

// pickForRescue picks engines, and waits until the one that is to prefill has a place. The pick is held meanwhile, so
// that the picker knows what the engine will have to do; if the engine fails, another pick follows. The stream holds
// its place until releasePlace.
func (x *exchange) pickForRescue(n int, mode Mode, p *Pick) *Error {
	for {
		if e := x.pick(x.ctx, n, mode, p); e != nil {
			return e
		}
		engine := p.Prefill.ID
		if p.Prefill.URL == nil {
			engine = p.Decode.ID
		}
		placed, e := x.waitForPlace(engine)
		if placed {
			x.rescue.placed, x.rescue.place = true, engine
			return nil
		}
		x.decline(p)
		if e != nil {
			return e
		}
	}
}

// waitForPlace waits until a stream has a place at an engine. It has none and no error if the engine failed meanwhile.
// All its waits together take no longer than a prefill may take and a response may be silent: by then the timeouts of
// those that have places have let it try another engine.
func (x *exchange) waitForPlace(engine string) (placed bool, e *Error) {
	q := &x.f.rescues
	turn := q.enter(engine)
	if turn == nil {
		return true, nil
	}
	var tooLong <-chan time.Time
	if limit := max(x.f.limits.Prefill, 0) + max(x.f.limits.Idle, 0); limit > 0 {
		timer := time.NewTimer(limit - time.Since(x.rescue.since))
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
	q.leave(engine, turn)
	return false, e
}

// releasePlace gives back what pickForRescue took, after an attempt that ended with e, or nil.
func (x *exchange) releasePlace(e *Error) {
	if r := x.rescue; r != nil && r.placed {
		r.placed = false
		x.f.rescues.release(r.place, e != nil && e.EngineFault())
	}
}
