// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"sync"
	"time"
)

// exchanges are the requests in flight: a list that costs no allocation, so that every request can be in it.
type exchanges struct {
	mu       sync.Mutex
	head     *exchange
	n        int
	draining bool
	idle     chan struct{} // made by drain, closed when the last exchange leaves
}

func (l *exchanges) enter(x *exchange) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.draining {
		return false
	}
	if x.next = l.head; x.next != nil {
		x.next.prev = x
	}
	l.head = x
	l.n++
	return true
}

func (l *exchanges) leave(x *exchange) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if x.next != nil {
		x.next.prev = x.prev
	}
	if x.prev != nil {
		x.prev.next = x.next
	} else {
		l.head = x.next
	}
	x.next, x.prev = nil, nil
	l.n--
	if l.n == 0 && l.idle != nil {
		close(l.idle)
		l.idle = nil
	}
}

// stop ends an exchange, whichever of its attempts runs.
func (x *exchange) stop(cause error) {
	l := &x.f.live
	l.mu.Lock()
	defer l.mu.Unlock()
	x.over = cause
	x.cancel(cause)
}

// cutting is how long requests that were cut may take to notice.
const cutting = 5 * time.Second

// drain refuses new exchanges, waits for the rest until ctx ends, then cancels them and waits for their end.
func (l *exchanges) drain(ctx context.Context) error {
	l.mu.Lock()
	l.draining = true
	if l.n == 0 {
		l.mu.Unlock()
		return nil
	}
	if l.idle == nil {
		l.idle = make(chan struct{})
	}
	idle := l.idle
	l.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	for x := l.head; x != nil; x = x.next {
		x.over = errCut
		x.cancel(errCut)
	}
	l.mu.Unlock()
	timer := time.NewTimer(cutting)
	defer timer.Stop()
	select {
	case <-idle:
	case <-timer.C: // a body that its owner does not close
	}
	return ctx.Err()
}

func (l *exchanges) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n
}

func (l *exchanges) list() []SessionInfo {
	l.mu.Lock()
	defer l.mu.Unlock()
	infos := make([]SessionInfo, 0, l.n)
	for x := l.head; x != nil; x = x.next {
		infos = append(infos, x.info())
	}
	return infos
}

func (x *exchange) info() SessionInfo {
	i := SessionInfo{RequestID: x.id, Model: x.req.Model, Connector: x.f.name, Phase: phaseNames[x.phase.Load()],
		Age: time.Since(x.start)}
	if a := x.current.Load(); a != nil {
		i.ID, i.Attempt, i.Prefill, i.Decode = a.s.ID, a.s.Attempt, a.s.Prefill.ID, a.s.Decode.ID
		if exp := a.expires.Load(); exp != 0 {
			i.ExpiresAt = time.Unix(0, exp)
		}
	}
	return i
}

// The phases of an exchange, for operators.
const (
	phasePick uint32 = iota
	phasePrepare
	phaseEncode
	phasePrefill
	phaseEvent
	phaseDecode
	phaseStream
	phaseBackoff
)

var phaseNames = [...]string{"pick", "prepare", "encode", "prefill", "event", "decode", "stream", "backoff"}
