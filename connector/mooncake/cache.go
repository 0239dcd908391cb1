// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"context"
	"encoding/json"
	"sync"
	"time"
)

// entry is what one bootstrap server has answered. It is never changed.
type entry struct {
	addr  json.RawMessage // its URL, as JSON
	ranks []rank          // in order of their numbers; at least one
	at    time.Time       // when it was asked: an engine that restarts later has another id
}

// rank is one data-parallel rank of an engine.
type rank struct {
	number int
	engine json.RawMessage // its engine id, as JSON
}

func (e *entry) find(number int) (rank, bool) {
	for _, r := range e.ranks {
		if r.number == number {
			return r, true
		}
	}
	return rank{}, false
}

// cache keeps bootstrap servers' answers for a while and lets only one request ask each server at a time.
type cache struct {
	ttl time.Duration

	mu    sync.Mutex
	slots map[string]*slot // by URL
}

// slot is one server's: its answer, if there is one, and the query that is under way, if there is one.
type slot struct {
	entry  *entry
	flight *flight
}

// flight is a query that is under way, for all who wait for it.
type flight struct {
	done  chan struct{}
	entry *entry
	err   error
	left  bool // it failed because the one who asked has left, which is no word on the server
}

// get returns a server's answer: the kept one while it is young, else the one that ask brings. Of many callers one asks; the others
// wait for it as long as their own contexts last, and one of them asks in its place if it leaves.
func (c *cache) get(ctx context.Context, url string, ask func() (*entry, error)) (*entry, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
		c.mu.Lock()
		s := c.slots[url]
		if s == nil {
			s = &slot{}
			if c.slots == nil {
				c.slots = map[string]*slot{}
			}
			c.slots[url] = s
		}
		if s.entry != nil && time.Since(s.entry.at) < c.ttl {
			defer c.mu.Unlock()
			return s.entry, nil
		}
		f := s.flight
		if f == nil {
			f = &flight{done: make(chan struct{})}
			s.flight = f
			c.mu.Unlock()
			c.fly(ctx, s, f, ask)
			return f.entry, f.err
		}
		c.mu.Unlock()
		select {
		case <-f.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		if !f.left {
			return f.entry, f.err
		}
	}
}

// fly asks. Even a panic of ask must not leave the others waiting.
func (c *cache) fly(ctx context.Context, s *slot, f *flight, ask func() (*entry, error)) {
	f.left = true
	defer func() {
		c.mu.Lock()
		s.flight = nil
		if f.entry != nil {
			s.entry = f.entry
			c.sweep()
		}
		c.mu.Unlock()
		close(f.done)
	}()
	f.entry, f.err = ask()
	f.left = f.err != nil && ctx.Err() != nil
}

// sweep forgets the servers that nobody has asked about for long: engines come and go. The caller holds the lock.
func (c *cache) sweep() {
	for url, s := range c.slots {
		if s.flight == nil && (s.entry == nil || time.Since(s.entry.at) > max(c.ttl, time.Minute)) {
			delete(c.slots, url)
		}
	}
}

// forget drops an answer, if it is still the one that is kept.
func (c *cache) forget(url string, e *entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.slots[url]; s != nil && s.entry == e {
		s.entry = nil
	}
}
