// SPDX-License-Identifier: Apache-2.0

// Package querycache caches what a connector asks engines beside the requests, such as a bootstrap server's ranks or a
// server's parameters, so that not every request has to ask.
package querycache

import (
	"context"
	"errors"
	"sync"
	"time"
)

// Entry is one cached value. It is never changed.
type Entry[T any] struct {
	Value T
	At    time.Time // when the query began: an engine that restarts after it has other values
}

// Cache keeps the results of queries for a while. At any time at most one caller queries a URL. It may be used
// concurrently.
type Cache[T any] struct {
	TTL time.Duration // how long an entry is used; with 0 only callers that wait for the same query share it

	mu    sync.Mutex
	slots map[string]*slot[T]
}

// slot has one URL's entry, if there is one, and the query that is running, if there is one.
type slot[T any] struct {
	kept    *Entry[T]
	running *query[T]
}

// query is a running query; all callers that need its result wait for it.
type query[T any] struct {
	done  chan struct{}
	entry *Entry[T]
	err   error
	left  bool // it failed because the caller that ran it has left, which says nothing about the server
}

// Get returns the entry of a URL: the cached one while it is younger than TTL, otherwise the one that ask returns. If
// several callers need the same entry, one of them asks, and the others wait as long as their own contexts last. If the
// caller that asks leaves, another one asks. Errors are not cached.
func (c *Cache[T]) Get(ctx context.Context, url string, ask func() (T, error)) (*Entry[T], error) {
	for {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		kept, q, mine := c.enter(url)
		switch {
		case kept != nil:
			return kept, nil
		case mine:
			c.run(ctx, url, q, ask)
			return q.entry, q.err
		}
		select {
		case <-q.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		if !q.left {
			return q.entry, q.err
		}
	}
}

// enter returns a young entry or the running query. If mine is true, the caller must run the query.
func (c *Cache[T]) enter(url string) (kept *Entry[T], q *query[T], mine bool) {
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
	if s.running != nil {
		return nil, s.running, false
	}
	s.running = &query[T]{done: make(chan struct{})}
	return nil, s.running, true
}

// run calls ask and gives its result to all who wait. Even if ask panics, nobody waits for ever.
func (c *Cache[T]) run(ctx context.Context, url string, q *query[T], ask func() (T, error)) {
	q.left = true
	defer func() {
		c.mu.Lock()
		s := c.slots[url]
		if s.running = nil; q.entry != nil {
			s.kept = q.entry
		}
		c.sweep()
		c.mu.Unlock()
		close(q.done)
	}()
	at := time.Now()
	value, err := ask()
	if err == nil {
		q.entry = &Entry[T]{value, at}
	}
	q.err, q.left = err, err != nil && ctx.Err() != nil
}

// sweep removes the URLs that nobody has asked for in a long time: engines come and go. The caller holds the lock.
func (c *Cache[T]) sweep() {
	for url, s := range c.slots {
		if s.running == nil && (s.kept == nil || time.Since(s.kept.At) > max(c.TTL, time.Minute)) {
			delete(c.slots, url)
		}
	}
}

// Forget removes an entry if it is still the cached one.
func (c *Cache[T]) Forget(url string, e *Entry[T]) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.slots[url]; s != nil && s.kept == e {
		s.kept = nil
	}
}

// Doubtful reports whether the cause of a failed attempt is a reason to ask its engines again. A client that leaves, or
// that sends what engines refuse, is no reason.
func Doubtful(cause error) bool {
	var judged interface{ EngineFault() bool }
	return !errors.As(cause, &judged) || judged.EngineFault()
}
