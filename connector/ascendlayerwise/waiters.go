// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise

import (
	"context"
	"errors"
	"io"
	"log"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
)

// nothingLogged keeps net/http from writing addresses into the process's log.
var nothingLogged = log.New(io.Discard, "", 0)

const (
	remembered   = time.Minute // how long callbacks of a settled session still get its response
	maxRemembers = 4096
)

// waiters are the sessions that wait for a callback, or were settled less than a minute ago, by the engine's request
// ids.
type waiters struct {
	mu      sync.Mutex
	byID    map[string]*waiter
	settled []*waiter // oldest first
	now     func() time.Time
}

func newWaiters() *waiters { return &waiters{byID: map[string]*waiter{}, now: time.Now} }

// waiter is one session.
type waiter struct {
	ids   []string
	asked chan struct{} // closed when D has called back; then event and err are set
	over  chan struct{} // closed when P has answered, or will not answer any more; then served is set

	once   sync.Once
	mu     sync.Mutex
	event  connector.Event // until take: it may be large, and the waiter is kept for a minute
	err    error
	served bool
	at     time.Time // when it was settled
	ended  bool      // guarded by the lock of waiters
}

func (l *waiters) expect(ids []string) *waiter {
	w := &waiter{ids: ids, asked: make(chan struct{}), over: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		l.byID[id] = w
	}
	return w
}

func (l *waiters) find(id string) *waiter {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.byID[id]
}

// settle records how a session's prefill ended. Only the first call counts: the flow calls done after P's response,
// too.
func (l *waiters) settle(w *waiter, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.ended {
		return
	}
	w.ended, w.served, w.at = true, err == nil, l.now()
	close(w.over)
	w.once.Do(func() { // a callback from now on starts nothing and is not kept
		w.err = errOver
		close(w.asked)
	})
	w.take()
	l.settled = append(l.settled, w)
	l.forget(w.at)
}

// forget removes the sessions that were settled more than a minute ago, and the oldest ones if there are too many.
func (l *waiters) forget(now time.Time) {
	n := 0
	for n < len(l.settled) && (len(l.settled)-n > maxRemembers || now.Sub(l.settled[n].at) > remembered) {
		for _, id := range l.settled[n].ids {
			delete(l.byID, id)
		}
		l.settled[n] = nil
		n++
	}
	l.settled = l.settled[n:]
}

// ask is called for each callback. Only the first call counts.
func (w *waiter) ask(e connector.Event, err error) {
	w.once.Do(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.err = err; err == nil {
			w.event = e
		}
		close(w.asked)
	})
}

// take returns the event and no longer keeps it.
func (w *waiter) take() connector.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.event
	w.event = connector.Event{}
	return e
}

var (
	errClosed = errors.New("ascendlayerwise: the callback server was closed")
	errOver   = errors.New("the session is over")
)

// wait waits for the callback. A callback that lacks what P needs ends the session, since nobody could push the KV that
// D waits for.
func (w *waiter) wait(ctx context.Context, s *server) (connector.Event, error) {
	select {
	case <-w.asked:
	case <-ctx.Done():
		return connector.Event{}, context.Cause(ctx)
	case <-s.closing:
		return connector.Event{}, errClosed
	}
	if w.err != nil {
		return connector.Event{}, handoff.NoTransfer("the decode engine's callback: %v", w.err)
	}
	return w.take(), nil
}
