// SPDX-License-Identifier: Apache-2.0

package rescue

import (
	"container/list"
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// atOnce is how many streams that are rescued a flow lets one engine prefill at a time. A decode engine may die
// with a thousand streams; all of them are rescued, but a request that comes meanwhile finds few of their prompts
// before its own. Four keep an engine busy: while it computes one prompt, the others are on their way.
const atOnce = 4

// Queue are the rescues of a flow, by the ID of the engine that prefills.
type Queue struct {
	mu sync.Mutex
	at map[string]*engineQueue
}

// engineQueue are those at one engine: those under way, and those that wait, first come first served.
type engineQueue struct {
	taken   int
	waiting list.List // of chan bool, which gets true with a place, and false to pick again
	failed  int       // failures in a row
}

// Place is what a stream holds from its pick until the prefill leg has served or its attempt has failed, or, where one
// engine serves alone, until its first event.
type Place struct {
	Engine string // its ID
	free   atomic.Bool
}

// ErrTooLong is the error of a wait that took too long.
var ErrTooLong = errors.New("pdflow: no place came in time")

// Take takes a place at an engine, and waits for one until ctx ends or, if until is not zero, until then. It returns
// neither a place nor an error if the stream is to pick another engine. Give, Served or Failed of the
// place must follow.
func (q *Queue) Take(ctx context.Context, engine string, until time.Time) (p *Place, waited bool, err error) {
	turn, placed := q.enter(engine), true
	if turn != nil {
		var tooLong <-chan time.Time
		if !until.IsZero() {
			timer := time.NewTimer(time.Until(until))
			defer timer.Stop()
			tooLong = timer.C
		}
		ch, _ := turn.Value.(chan bool)
		select {
		case placed = <-ch:
		case <-tooLong:
			err = ErrTooLong
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if err != nil {
		q.leave(engine, turn)
		return nil, true, err
	}
	if placed {
		p = &Place{Engine: engine}
	}
	return p, turn != nil, nil
}

// enter takes a place at an engine, or queues for one: then turn is not nil.
func (q *Queue) enter(engine string) (turn *list.Element) {
	q.mu.Lock()
	defer q.mu.Unlock()
	at := q.at[engine]
	if at == nil {
		if q.at == nil {
			q.at = map[string]*engineQueue{}
		}
		at = new(engineQueue)
		q.at[engine] = at
	}
	if at.taken < atOnce {
		at.taken++
		return nil
	}
	return at.waiting.PushBack(make(chan bool, 1))
}

// leave ends the wait of one whose turn did not come, or came too late.
func (q *Queue) leave(engine string, turn *list.Element) {
	q.mu.Lock()
	if at := q.at[engine]; at != nil {
		at.waiting.Remove(turn)
	}
	q.mu.Unlock()
	ch, _ := turn.Value.(chan bool)
	select {
	case placed := <-ch:
		if placed {
			q.Give(&Place{Engine: engine})
		}
	default:
	}
}

// Give gives back a place at which the engine has neither served nor failed. Of a place only the first Give, Served or
// Failed counts. p may be nil.
func (q *Queue) Give(p *Place) { q.give(p, func(failures int) int { return failures }, false) }

// Served gives back the place of a leg that the engine has served.
func (q *Queue) Served(p *Place) { q.give(p, func(int) int { return 0 }, false) }

// Failed gives back the place of an attempt by which the engine has failed. When it has failed once, two times in a
// row, four, eight …, all that wait for it pick again: at each failure they would pick far too often, and at the first
// alone the picker may not know enough yet.
func (q *Queue) Failed(p *Place) { q.give(p, func(failures int) int { return failures + 1 }, true) }

func (q *Queue) give(p *Place, row func(failures int) int, failed bool) {
	if p == nil || p.free.Swap(true) {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	at := q.at[p.Engine]
	at.taken--
	at.failed = row(at.failed)
	again := failed && at.failed&(at.failed-1) == 0
	for w := at.waiting.Front(); w != nil && (again || at.taken < atOnce); w = at.waiting.Front() {
		turn, _ := at.waiting.Remove(w).(chan bool)
		if !again {
			at.taken++
		}
		turn <- !again
	}
	if at.taken == 0 { // then nobody waits
		delete(q.at, p.Engine)
	}
}

// Held reports whether the place is at an engine and was not given back. p may be nil.
func (p *Place) Held(engine string) bool { return p != nil && p.Engine == engine && !p.free.Load() }

// Engines returns at how many engines rescues are under way.
func (q *Queue) Engines() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.at)
}
