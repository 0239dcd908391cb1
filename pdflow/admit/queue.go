// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"container/list"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/pdflow"
)

// The reasons for which requests are refused: values of the metric's attribute pd.reason.
const (
	reasonFull    = "queue_full" // as many wait as may
	reasonWait    = "wait"       // it would have to wait too long, by the pace at which others leave the queue
	reasonTimeout = "timeout"    // it has waited too long
)

// PriorityHeader returns a function for [Options] that reads the priority from a header of the client: a whole number,
// 0 where there is none. Whoever sends it chooses who waits: name a header that a proxy in front sets or takes away.
func PriorityHeader(name string) func(*pdflow.PickInput) int {
	return func(in *pdflow.PickInput) int {
		n, err := strconv.Atoi(in.Header.Get(name))
		if err != nil {
			return 0
		}
		return n
	}
}

// queue are the requests that wait, in the order of their priorities, and those of one priority in that of their
// arrival.
type queue struct {
	l    list.List // of *waiter
	last time.Time // when the last request left for an engine, while others waited; zero: the queue was empty since
	gap  float64   // mean seconds between two such moments; 0: not known

	standing bool      // the queue has been too long and arrivals still exceed what is served
	refusal  time.Time // the last refusal while standing
}

type waiter struct {
	wake  chan struct{} // it may be this request's turn
	since time.Time
	at    *list.Element

	priority int
	dropped  bool      // another request has taken its place
	named    [2]string // IDs of the engines that the request names, by role; "": any
}

func (q *queue) len() int { return q.l.Len() }

// ahead returns how many requests would be ahead of one that arrives, and the last of them, nil for none.
func (q *queue) ahead(priority int) (n int, last *list.Element) {
	n, last = q.l.Len(), q.l.Back()
	for last != nil && waiterAt(last).priority > priority {
		n, last = n-1, last.Prev()
	}
	return n, last
}

func (q *queue) add(priority int) *waiter {
	w := &waiter{wake: make(chan struct{}, 1), since: time.Now(), priority: priority}
	if _, last := q.ahead(priority); last != nil {
		w.at = q.l.InsertAfter(w, last)
	} else {
		w.at = q.l.PushFront(w)
	}
	return w
}

// waiterAt returns the request of a place in the queue, nil for nil.
func waiterAt(e *list.Element) *waiter {
	if e == nil {
		return nil
	}
	w, _ := e.Value.(*waiter)
	return w
}

// dropLast takes the last request out of the queue, which that request finds when it wakes.
func (q *queue) dropLast() {
	w := waiterAt(q.l.Back())
	w.dropped = true
	q.l.Remove(w.at)
	w.rouse()
}

func (q *queue) remove(w *waiter) {
	if q.l.Remove(w.at); q.l.Len() == 0 {
		q.last = time.Time{}
	}
}

func (w *waiter) rouse() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// granted notes that a request leaves for an engine.
func (q *queue) granted(now time.Time) {
	if !q.last.IsZero() {
		q.gap = mean(q.gap, now.Sub(q.last).Seconds(), 16)
	}
	q.last = now
}

// mean moves an average over about so many samples towards a sample. 0 is no average yet.
func mean(old, sample, over float64) float64 {
	if old == 0 {
		return sample
	}
	return old + (sample-old)/over
}

// How long the wait in the queue may get with adaptive limits, in units of a.unit. The wait at an engine to which a
// share of 0.8 of what it can serve is offered exceeds x units with a probability of about exp(-x/2) (Kingman's law of
// congestion), so a load that can be served is not refused. A queue that got so long is cut short from then on, since
// it only has to keep the engines busy, until nobody has been refused for a while.
const (
	burst    = 24
	standing = 8
	calm     = 64
)

// unit is the mean square of an uncrowded prefill's time over its mean, in seconds: prompts that differ much make
// longer queues. It is at least the time in which a request leaves the queue, if decode engines are the narrow place.
func (a *admission) unit() float64 {
	return max(a.squares/a.service, a.queue.gap)
}

// refusal returns why a request that arrives now must not wait, "" if it may. The caller holds a.mu.
func (a *admission) refusal(priority int) string {
	q := &a.queue
	ahead, _ := q.ahead(priority)
	if ahead >= a.o.Queue {
		return reasonFull
	}
	wait := float64(ahead+1) * q.gap
	if wait > a.o.QueueTimeout.Seconds() {
		return reasonWait
	}
	if !a.o.Adaptive || a.service == 0 || q.gap == 0 {
		return ""
	}
	now, unit := time.Now(), a.unit()
	if q.standing && now.Sub(q.refusal).Seconds() > calm*unit {
		q.standing = false
	}
	most := float64(burst)
	if q.standing {
		most = standing
	}
	if wait <= most*unit {
		return ""
	}
	q.standing, q.refusal = true, now
	return reasonWait
}
