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

// Others is how many requests of others an engine has that said at a time how many it has in all. sent is how many of
// the gateway's own came since, less those that ended. known is false where the engine cannot be right, since the
// gateway had far more there itself: its figures have stopped, or count something else. A few requests may have ended
// at the engine whose clients still read.
func (e *Engine) Others(total int, at time.Time) (others, sent int, known bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	then := e.at(at)
	return max(0, total-int(then)), int(e.own - then), 2*total+4 >= int(then)
}

// Mean is the mean of what engines have of others, by what was heard lately: so many has an engine that does not say,
// or is wrong. Else it would look idle to every gateway. The zero value is 0.
type Mean struct {
	mu   sync.Mutex
	n    float64
	mean float64
}

// window is how many reports weigh in a mean.
const window = 32

// Add takes in what one engine has.
func (m *Mean) Add(others int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.n = min(m.n+1, window)
	m.mean += (float64(others) - m.mean) / m.n
}

// Value is the mean.
func (m *Mean) Value() float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mean
}
