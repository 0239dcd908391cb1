// SPDX-License-Identifier: Apache-2.0

// Package inflight tells others' requests at an engine from a gateway's own. What an engine says of its load is some
// time old, and counts both. So a gateway remembers how many of its own requests the engine had at that time: what is
// left are others', and its own count as they are now. Nothing counts twice, and nothing that was sent since is missed.
package inflight

import (
	"sync"
	"time"
)

const (
	tick  = 40 * time.Millisecond
	ticks = 256 // about ten seconds are remembered
)

// Engine is one engine's share of a gateway's requests. The zero value has none.
type Engine struct {
	mu      sync.Mutex
	base    time.Time // of the ticks
	changed time.Time
	newest  int64 // the tick of the last change
	own     int32
	past    [ticks]int32 // own at the end of each tick before newest
}

// Add notes n more requests that the engine has from this gateway, or -n fewer.
func (e *Engine) Add(n int, now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.base.IsZero() {
		e.base = now
	}
	if k := int64(now.Sub(e.base) / tick); k > e.newest {
		for i := max(e.newest, k-ticks); i < k; i++ {
			e.past[i%ticks] = e.own
		}
		e.newest = k
	}
	e.own += int32(n)
	e.changed = now
}

// at is how many there were at a time; what is too long ago counts as the oldest that is remembered.
func (e *Engine) at(t time.Time) int32 {
	if e.base.IsZero() || !t.Before(e.changed) {
		return e.own
	}
	k := int64((t.Sub(e.base)+tick/2)/tick) - 1 // the tick that ended next to it
	if k < 0 && e.newest < ticks {
		return 0
	}
	if k = max(k, e.newest-ticks, 0); k >= e.newest {
		return e.own
	}
	return e.past[k%ticks]
}

// Fleet is what the engines of one role have of others' requests. The zero value has heard of none.
type Fleet struct {
	mu     sync.Mutex
	heard  time.Time
	n      float64
	others float64 // of an engine, on average
	own    float64
}

const (
	window    = 64               // reports weigh in a mean
	forgotten = 10 * time.Second // without a report
	most      = 16               // times as many as the gateway itself: what others are taken to have sent since
)

// Others is how many requests of others an engine has that said at a time how many it has in all: those that it had
// then, and as many more, or fewer, as have come to it since from this gateway, times the others' share of all. Others
// choose by the same figures and send it as much; without that, four gateways would each fill the emptiest engine.
//
// known is false where the engine said nothing (at is zero), or cannot be right, since the gateway itself had far more
// there: its figures have stopped, or count something else. Then it has as many as others of its role. Else it would
// look idle to every gateway, and get everything. A few requests may have ended at the engine whose clients still read.
func (f *Fleet) Others(e *Engine, total int, at, now time.Time) (others float64, known bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if now.Sub(f.heard) > forgotten {
		f.n, f.others, f.own = 0, 0, 0
	}
	if at.IsZero() {
		return f.others, false
	}
	then, sent := e.since(at)
	if 2*total+4 < then {
		return f.others, false
	}
	others = float64(max(0, total-then))
	f.heard, f.n = now, min(f.n+1, window)
	f.others += (others - f.others) / f.n
	f.own += (float64(then) - f.own) / f.n
	return max(0, others+float64(sent)*f.ratio()), true
}

// ratio is how many requests others have at an engine for each of the gateway's own. From few of its own that cannot be
// told.
func (f *Fleet) ratio() float64 { return min(f.others*f.own/((f.own+1)*(f.own+1)), most) }

// since is how many of the gateway's requests there were at a time, and how many more there are now.
func (e *Engine) since(at time.Time) (then, sent int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := e.at(at)
	return int(n), int(e.own - n)
}
