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
	reasonWait    = "wait"       // it would have to wait too long, or more of them wait than keep the engines busy
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
	l list.List // of *waiter
	// Means over those that have left for an engine: how many seconds each waited, until how many places were free.
	waits, places average

	standing bool      // the queue has been too long and arrivals still exceed what is served
	refusal  time.Time // the last refusal while standing
}

type waiter struct {
	wake  chan struct{} // it may be this request's turn
	since time.Time
	at    *list.Element

	priority int
	places   int       // at engines that had to get free when it came, its own included
	dropped  bool      // another request has taken its place
	named    [2]string // IDs of the engines that the request names, by role; "": any
}

func (q *queue) len() int { return q.l.Len() }

// add queues a request behind those of its priority.
func (q *queue) add(w *waiter) *waiter {
	w.wake, w.since = make(chan struct{}, 1), time.Now()
	last := q.l.Back()
	for last != nil && waiterAt(last).priority > w.priority {
		last = last.Prev()
	}
	if last != nil {
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

// drop takes a request out of the queue, which that request finds when it wakes.
func (q *queue) drop(w *waiter) {
	w.dropped = true
	q.l.Remove(w.at)
	w.rouse()
}

func (q *queue) remove(w *waiter) {
	q.l.Remove(w.at)
}

func (w *waiter) rouse() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// granted notes that a request leaves for an engine.
func (q *queue) granted(w *waiter) {
	q.waits.add(time.Since(w.since).Seconds(), 16)
	q.places.add(float64(w.places), 16)
}

// gap is the mean time from one place that gets free to the next, in seconds; 0: not known. Places may get free many at
// a time, as a batch ends, so the time between two of them would not tell it.
func (q *queue) gap() float64 { return q.waits.mean / max(q.places.mean, 1) }

// average is a mean over about as many of the latest samples as add is told.
type average struct {
	mean float64
	n    int
}

func (a *average) add(sample float64, over int) {
	a.n = min(a.n+1, over)
	a.mean += (sample - a.mean) / float64(a.n)
}

// How many requests may wait with adaptive limits. The wait at an engine to which a share of 0.8 of what it can serve
// is offered exceeds the time of x requests with a probability of about exp(-x/2) (Kingman's law of congestion), so a
// load that can be served is not refused. A queue that got so long is cut short from then on, since it only has to keep
// the engines busy, until nobody has been refused for a while. The numbers hold whatever an engine's pace is, so they
// bound the wait from the first second on, in which no pace is known. A fleet whose pace is known to be high may have
// more in the queue: as many as leave within the seconds of unnoticed.
const (
	burst     = 24
	standing  = 8
	calm      = 64
	unnoticed = 0.1
)

// differ is by how much prompts that differ make the queue longer: the mean square of an uncrowded prefill's time over
// the square of its mean.
func (a *admission) differ() float64 {
	if a.service.n == 0 {
		return 1
	}
	return a.squares.mean / (a.service.mean * a.service.mean)
}

// refusal returns why a request that arrives now must not wait, "" if it may. ahead is how many places at engines must
// get free before its own. The caller holds a.mu.
func (a *admission) refusal(ahead int) string {
	q := &a.queue
	gap := q.gap()
	if float64(ahead+1)*gap > a.o.QueueTimeout.Seconds() {
		return reasonWait
	}
	if !a.o.Adaptive {
		return ""
	}
	now, differ := time.Now(), a.differ()
	if q.standing && now.Sub(q.refusal).Seconds() > calm*differ*gap {
		q.standing = false
	}
	most := burst * differ
	if q.standing {
		most = standing * differ
	}
	if gap > 0 {
		most = max(most, unnoticed/gap)
	}
	if float64(ahead+1) <= most {
		return ""
	}
	q.standing, q.refusal = true, now
	return reasonWait
}

// over returns how many requests must leave their engines before the queue moves: those above limits that have shrunk.
func (a *admission) over() int {
	var over [2]int
	for _, e := range a.engines {
		for role := range e.limits {
			if l := int(e.limits[role].limit); l > 0 {
				over[role] += max(0, e.inFlight[role]-l)
			}
		}
	}
	return max(over[prefillRole], over[decodeRole])
}

// retryAfter is when all that wait now will have been served, at the queue's pace, but for those that wait for an
// engine that they name.
func (a *admission) retryAfter() time.Duration {
	rivals, _, _ := a.rivals([2]string{}, 0)
	wait := float64(rivals+a.over()) * a.queue.gap()
	return max(leastRetryAfter, time.Duration(wait*float64(time.Second)))
}
