// SPDX-License-Identifier: Apache-2.0

package enginesim

import "time"

// lease pins the blocks of a finished prefill until another engine has read
// them, or until it expires.
type lease struct {
	request string
	blocks  []int32
	prompt  TokenKey
	kept    bool // for a next turn that may never come: unread is no fault
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

// pin turns a finished sequence's blocks into a lease; the sequence is over.
func (c *core) pin(s *sequence, prompt TokenKey) []int32 {
	return c.hold(s, &lease{prompt: prompt}, c.cfg.Lease)
}

// keep is pin for blocks that another engine may read, or not.
func (c *core) keep(s *sequence, tokens TokenKey, ttl time.Duration) []int32 {
	return c.hold(s, &lease{prompt: tokens, kept: true}, ttl)
}

func (c *core) hold(s *sequence, l *lease, ttl time.Duration) []int32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.request, l.blocks, l.expires = s.id, s.blocks, time.Now().Add(ttl)
	c.leases.held[s.id] = l
	l.timer = time.AfterFunc(ttl, func() { c.expire(l) })
	if c.leases.closed {
		l.timer.Stop()
	}
	blocks := s.blocks
	c.releaseLocked(s, false)
	c.ledger.handedOff(s.id)
	return blocks
}

// unpin lets go of a handoff's blocks, and says whether it was still known.
func (c *core) unpin(request string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	l, ok := c.leases.held[request]
	if !ok {
		return false
	}
	c.drop(l)
	return true
}

// extend is a heartbeat: the lease lasts at least two thirds of its length more
// (vLLM's NIXL connector, protocols/vllm.md 3.3).
func (c *core) extend(request string) {
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

func (c *core) expire(l *lease) {
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
	c.stats.add(&c.stats.Expired, 1)
	c.ledger.expired(l.request)
}

func (c *core) drop(l *lease) {
	l.timer.Stop()
	delete(c.leases.held, l.request)
	c.pool.release(l.blocks)
	c.pump()
}

// leased gives what the lease of a request covers.
func (c *core) leased(request string) (blocks []int32, prompt TokenKey, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l, ok := c.leases.held[request]
	if !ok {
		return nil, TokenKey{}, false
	}
	return l.blocks, l.prompt, true
}

// freeze stops the core and the clock of its leases. A core that is let go on ends the leases that ran out meanwhile.
func (c *core) freeze(frozen bool) {
	c.gate.set(frozen)
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

// close stops the timers; the leases stay as they are, for the ledger.
func (c *core) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leases.closed = true
	for _, l := range c.leases.held {
		l.timer.Stop()
	}
}
