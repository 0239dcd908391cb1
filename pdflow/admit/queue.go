// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"container/list"
	"time"
)

// The reasons for which requests are refused: values of the metric's attribute pd.reason.
const (
	reasonFull    = "queue_full" // as many wait as may
	reasonWait    = "wait"       // it would have to wait too long, by the pace at which others leave the queue
	reasonTimeout = "timeout"    // it has waited too long
)

// queue are the requests that wait, in the order of their arrival.
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
}

func (q *queue) len() int { return q.l.Len() }

func (q *queue) add() *waiter {
	w := &waiter{wake: make(chan struct{}, 1), since: time.Now()}
	w.at = q.l.PushBack(w)
	return w
}

func (q *queue) first() *waiter {
	if e := q.l.Front(); e != nil {
		w, _ := e.Value.(*waiter)
		return w
	}
	return nil
}

func (q *queue) remove(w *waiter) {
	if q.l.Remove(w.at); q.l.Len() == 0 {
		q.last = time.Time{}
	}
}

func (q *queue) wakeFirst() {
	if w := q.first(); w != nil {
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

// granted notes that the first request leaves for an engine.
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

// How long the wait in the queue may get with adaptive limits, in units of p.unit. The wait at an engine to which a
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
func (p *Picker) unit() float64 {
	return max(p.squares/p.service, p.queue.gap)
}

// refusal returns why a request that arrives now must not wait, "" if it may. The caller holds p.mu.
func (p *Picker) refusal() string {
	q := &p.queue
	if q.len() >= p.o.Queue {
		return reasonFull
	}
	wait := float64(q.len()+1) * q.gap
	if wait > p.o.QueueTimeout.Seconds() {
		return reasonWait
	}
	if !p.o.Adaptive || p.service == 0 || q.gap == 0 {
		return ""
	}
	now, unit := time.Now(), p.unit()
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
