// SPDX-License-Identifier: Apache-2.0

// Package live knows what runs in a flow: requests, prefill legs that outlive theirs, and retries. It waits for what
// runs and cuts it, limits the time of phases, and bounds retries.
package live

import (
	"context"
	"sync"
	"time"

	"github.com/pdkit/pdkit/transport"
)

// cutting is how long what was cut may take to notice.
const cutting = 5 * time.Second

// Set holds what runs. The zero Set is open and empty.
type Set[T interface {
	comparable
	// Stop ends what runs, with a cause. It does not wait, and does not call the Set.
	Stop(cause error)
}] struct {
	mu      sync.Mutex
	members map[T]struct{}
	closed  bool
	cut     error         // not nil: the members were cut, and so is each that enters
	idle    chan struct{} // closed when the last member leaves; nil if nobody waits for that
}

// Enter adds a member. It returns false if the Set is closed.
func (s *Set[T]) Enter(x T) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	if s.members == nil {
		s.members = map[T]struct{}{}
	}
	s.members[x] = struct{}{}
	if s.cut != nil {
		x.Stop(s.cut)
	}
	return true
}

// Leave removes a member.
func (s *Set[T]) Leave(x T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.members, x)
	if len(s.members) == 0 && s.idle != nil {
		close(s.idle)
		s.idle = nil
	}
}

// Close lets nobody in any more.
func (s *Set[T]) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

// Closed reports whether Close was called.
func (s *Set[T]) Closed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// Count returns how many members there are.
func (s *Set[T]) Count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.members)
}

// Each calls f with each member, in no order. f must not call the Set.
func (s *Set[T]) Each(f func(T)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for x := range s.members {
		f(x)
	}
}

// Drain waits until the Set is empty. When ctx ends it stops the members with cause, waits for their end for some
// seconds, since one may be a response that its owner does not close, and returns ctx's error.
func (s *Set[T]) Drain(ctx context.Context, cause error) error {
	if idle := s.empty(nil); idle != nil {
		select {
		case <-idle:
			return nil
		case <-ctx.Done():
		}
		timer := time.NewTimer(cutting)
		defer timer.Stop()
		select {
		case <-s.empty(cause):
		case <-timer.C:
		}
		return ctx.Err()
	}
	return nil
}

var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// empty returns a channel that is closed once the Set is empty. Without a cause it returns nil if it is empty now.
func (s *Set[T]) empty(cause error) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if cause != nil {
		s.cut = cause
		for x := range s.members {
			x.Stop(cause)
		}
	}
	if len(s.members) == 0 {
		if cause != nil {
			return closed
		}
		return nil
	}
	if s.idle == nil {
		s.idle = make(chan struct{})
	}
	return s.idle
}

// Life is a request's context. Each of its attempts gets one of its own, since a failed attempt's is cancelled.
type Life struct {
	Base    context.Context         // of all attempts
	Context context.Context         // of the current one
	Cancel  context.CancelCauseFunc // ends the current one

	mu    sync.Mutex
	ended error // why no further attempt may run
}

// Begin begins a life within base.
func (l *Life) Begin(base context.Context) {
	l.Base = base
	l.Context, l.Cancel = context.WithCancelCause(base)
}

// Renew gives the next attempt a context. Its legs go out on new connections: idle ones may have died with the one that
// the last attempt was sent on.
func (l *Life) Renew() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.Context, l.Cancel = context.WithCancelCause(transport.WithNewConnection(l.Base))
	if l.ended != nil {
		l.Cancel(l.ended)
	}
}

// Stop ends the attempt that runs, and all that follow. Any goroutine may call it.
func (l *Life) Stop(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = cause
	l.Cancel(cause)
}
