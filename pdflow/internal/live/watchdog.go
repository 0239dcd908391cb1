// SPDX-License-Identifier: Apache-2.0

package live

import (
	"sync"
	"sync/atomic"
	"time"
)

// Watchdog tells its owner when one of the phases that it watches takes too long. Phases follow each other, and so do
// the reads of a streamed response, many thousands a second: a new limit therefore costs an atomic store. The timer is
// set for the first limit, looks again when it fires, and is set for what is left then.
type Watchdog struct {
	owner interface{ Expire() }
	born  time.Time
	due   atomic.Int64 // when the phase must have ended, in nanoseconds since born; 0: no phase is limited now
	fires atomic.Int64 // when the timer fires; 0: it is not set

	mu      sync.Mutex
	timer   *time.Timer
	stopped bool

	expiring sync.Mutex // while the owner is told
}

// Init sets whom to tell, and a time not after now from which limits are counted. It must come before all else.
func (w *Watchdog) Init(owner interface{ Expire() }, born time.Time) { w.owner, w.born = owner, born }

// Limit begins a phase that must end within d. A d that is not positive is no limit.
func (w *Watchdog) Limit(d time.Duration) {
	if d <= 0 {
		w.Relax()
		return
	}
	due := int64(time.Since(w.born) + d)
	w.due.Store(due)
	if at := w.fires.Load(); at == 0 || at > due {
		w.set(due)
	}
}

// Relax ends the phase's limit.
func (w *Watchdog) Relax() { w.due.Store(0) }

// Deadline returns when the running phase must have ended, the zero time without a limit.
func (w *Watchdog) Deadline() time.Time {
	if due := w.due.Load(); due != 0 {
		return w.born.Add(time.Duration(due))
	}
	return time.Time{}
}

func (w *Watchdog) set(due int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if at := w.fires.Load(); w.stopped || at != 0 && at <= due {
		return
	}
	w.fires.Store(due)
	left := time.Duration(due) - time.Since(w.born)
	if w.timer == nil {
		w.timer = time.AfterFunc(left, w.look)
	} else {
		w.timer.Reset(left)
	}
}

// look expires the phase if its time is over. fires is cleared before due is read, and limit writes due before it reads
// fires: so one of the two sees the other, and no limit is left without a timer.
func (w *Watchdog) look() {
	w.fires.Store(0)
	switch due := w.due.Load(); {
	case due == 0:
	case due <= int64(time.Since(w.born)):
		w.expiring.Lock()
		defer w.expiring.Unlock()
		if w.Over() { // else it has ended while the last one that expired was told
			w.owner.Expire()
		}
	default:
		w.set(due)
	}
}

// Over reports whether the running phase has taken too long.
func (w *Watchdog) Over() bool {
	due := w.due.Load()
	return due != 0 && due <= int64(time.Since(w.born))
}

// Extend gives the running phase d more from now on, if it has taken too long.
func (w *Watchdog) Extend(d time.Duration) {
	old, due := w.due.Load(), int64(time.Since(w.born)+d)
	if old == 0 || old > due-int64(d) || !w.due.CompareAndSwap(old, due) {
		return
	}
	if at := w.fires.Load(); at == 0 || at > due {
		w.set(due)
	}
}

// Wait returns when the owner is not being told of a phase any more. It comes after Stop.
func (w *Watchdog) Wait() {
	w.expiring.Lock()
	defer w.expiring.Unlock()
}

// Stop ends the watch for good.
func (w *Watchdog) Stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopped = true; w.timer != nil {
		w.timer.Stop()
	}
}
