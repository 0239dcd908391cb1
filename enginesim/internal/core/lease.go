// SPDX-License-Identifier: Apache-2.0

package core

import "time"

// lease pins the blocks of a finished prefill until another engine has read them, or until it expires.
type lease struct {
	request string
	blocks  []int32
	prompt  TokenKey
	kept    bool // for a next turn, which may never come: that nobody reads it is no breach
	expires time.Time
	timer   *time.Timer
}

// leaseBook holds the leases of a core, under the core's lock.
type leaseBook struct {
	held   map[string]*lease
	frozen bool
	closed bool
}

func (b *leaseBook) pinned() int {
	n := 0
	for _, l := range b.held {
		n += len(l.blocks)
	}
	return n
}

// Pin turns a finished sequence's blocks into a lease, and ends the sequence.
func (c *Core) Pin(s *Sequence, prompt TokenKey) []int32 {
	return c.hold(s, &lease{prompt: prompt}, c.cfg.Lease)
}

// Keep is Pin for blocks that another engine may read, but need not.
func (c *Core) Keep(s *Sequence, tokens TokenKey, ttl time.Duration) []int32 {
	return c.hold(s, &lease{prompt: tokens, kept: true}, ttl)
}

func (c *Core) hold(s *Sequence, l *lease, ttl time.Duration) []int32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.request, l.blocks, l.expires = s.ID, s.Blocks, time.Now().Add(ttl)
	c.leases.held[s.ID] = l
	l.timer = time.AfterFunc(ttl, func() { c.expire(l) })
	if c.leases.closed {
		l.timer.Stop()
	}
	blocks := s.Blocks
	c.releaseLocked(s, false)
	c.Ledger.handedOff(s.ID)
	return blocks
}

// Unpin lets go of a handoff's blocks, and reports whether it was still known.
func (c *Core) Unpin(request string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	l, ok := c.leases.held[request]
	if !ok {
		return false
	}
	c.drop(l)
	return true
}

// Extend is a heartbeat. From now on the lease lasts at least two thirds of its length (vLLM's NIXL connector,
// docs/protocols/nixl.md §4).
func (c *Core) Extend(request string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l, ok := c.leases.held[request]
	if !ok || c.leases.closed {
		return
	}
	if until := time.Now().Add(c.cfg.Lease * 2 / 3); until.After(l.expires) {
		l.expires = until
		l.timer.Reset(time.Until(until))
	}
}

func (c *Core) expire(l *lease) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leases.held[l.request] != l || c.leases.frozen || c.leases.closed {
		return
	}
	if left := time.Until(l.expires); left > 0 {
		l.timer.Reset(left)
		return
	}
	c.drop(l)
	if l.kept {
		return
	}
	c.Stats.Add(&c.Stats.Expired, 1)
	c.Ledger.expired(l.request)
}

func (c *Core) drop(l *lease) {
	l.timer.Stop()
	delete(c.leases.held, l.request)
	c.pool.release(l.blocks)
	c.pump()
}

// Leased gives what the lease of a request covers.
func (c *Core) Leased(request string) (blocks []int32, prompt TokenKey, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l, ok := c.leases.held[request]
	if !ok {
		return nil, TokenKey{}, false
	}
	return l.blocks, l.prompt, true
}

// Freeze stops the core and the clock of its leases. When the core goes on, it ends the leases that ran out meanwhile.
func (c *Core) Freeze(frozen bool) {
	c.Gate.Set(frozen)
	c.mu.Lock()
	c.leases.frozen = frozen
	var late []*lease
	if !frozen {
		for _, l := range c.leases.held {
			late = append(late, l)
		}
	}
	c.mu.Unlock()
	for _, l := range late {
		c.expire(l)
	}
}

// Close stops the timers; the leases stay as they are, for the ledger.
func (c *Core) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leases.closed = true
	for _, l := range c.leases.held {
		l.timer.Stop()
	}
}
