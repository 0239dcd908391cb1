// SPDX-License-Identifier: Apache-2.0

// Package answers keeps what engines say of themselves besides the requests (a bootstrap server's ranks, a server's parameters), so that
// not each request asks.
package answers

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Answer is one that is kept. It is never changed.
type Answer[T any] struct {
	Value T
	At    time.Time // when it was asked for: an engine that restarts later says something else
}

// Cache keeps answers for a while, and lets only one request ask the same at a time. It may be used concurrently.
type Cache[T any] struct {
	TTL time.Duration // how long an answer is believed; 0 asks anew for each, but for those who wait already

	mu    sync.Mutex
	slots map[string]*slot[T]
}

// slot has one server's answer, if there is one, and the question that is under way, if there is one.
type slot[T any] struct {
	kept  *Answer[T]
	asked *question[T]
}

// question is under way, for all who wait for it.
type question[T any] struct {
	done   chan struct{}
	answer *Answer[T]
	err    error
	left   bool // it failed because the one who asked has left, which is no word on the server
}

// Get returns the answer of a URL: the kept one while it is young, else the one that ask brings. Of many callers one asks; the others
// wait for it as long as their own contexts last, and one of them asks in its place if it leaves. Errors are not kept.
func (c *Cache[T]) Get(ctx context.Context, url string, ask func() (T, error)) (*Answer[T], error) {
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		kept, q, mine := c.enter(url)
		switch {
		case kept != nil:
			return kept, nil
		case mine:
			c.put(ctx, url, q, ask)
			return q.answer, q.err
		}
		select {
		case <-q.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		if !q.left {
			return q.answer, q.err
		}
	}
}

// enter returns a young answer, or the question that is under way; mine says that the caller is to put it.
func (c *Cache[T]) enter(url string) (kept *Answer[T], q *question[T], mine bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.slots[url]
	if s == nil {
		s = &slot[T]{}
		if c.slots == nil {
			c.slots = map[string]*slot[T]{}
		}
		c.slots[url] = s
	}
	if s.kept != nil && time.Since(s.kept.At) < c.TTL {
		return s.kept, nil, false
	}
	if s.asked != nil {
		return nil, s.asked, false
	}
	s.asked = &question[T]{done: make(chan struct{})}
	return nil, s.asked, true
}

// put asks. Even a panic of ask must not leave the others waiting.
func (c *Cache[T]) put(ctx context.Context, url string, q *question[T], ask func() (T, error)) {
	q.left = true
	defer func() {
		c.mu.Lock()
		s := c.slots[url]
		if s.asked = nil; q.answer != nil {
			s.kept = q.answer
		}
		c.sweep()
		c.mu.Unlock()
		close(q.done)
	}()
	at := time.Now()
	value, err := ask()
	if err == nil {
		q.answer = &Answer[T]{value, at}
	}
	q.err, q.left = err, err != nil && ctx.Err() != nil
}

// sweep forgets the servers that nobody has asked about for long: engines come and go. The caller holds the lock.
func (c *Cache[T]) sweep() {
	for url, s := range c.slots {
		if s.asked == nil && (s.kept == nil || time.Since(s.kept.At) > max(c.TTL, time.Minute)) {
			delete(c.slots, url)
		}
	}
}

// Forget drops an answer, if it is still the one that is kept.
func (c *Cache[T]) Forget(url string, a *Answer[T]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.slots[url]; s != nil && s.kept == a {
		s.kept = nil
	}
}

// Doubtful reports whether an attempt that failed of this cause casts doubt on what its engines have said. A client that leaves, or sends
// what engines refuse, casts none.
func Doubtful(cause error) bool {
	var judged interface{ EngineFault() bool }
	return !errors.As(cause, &judged) || judged.EngineFault()
}
