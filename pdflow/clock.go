// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"sync"
	"time"
)

// clock bounds the wait for decode's first event where both legs are in flight. It starts with P's answer and not with the
// leg, since D's first byte then includes the prefill's time; P's answer is bounded by the prefill timeout.
type clock struct {
	limit time.Duration

	mu     sync.Mutex
	expire func()
	begun  bool
	over   bool
	timer  *time.Timer
}

func (a *attempt) decodeClock() *clock { return &clock{limit: a.f.opts.timeouts.Decode} }

// bound says what to do when the time is over.
func (c *clock) bound(expire func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.expire = expire
	c.arm()
}

// begin starts the clock.
func (c *clock) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.begun = true
	c.arm()
}

func (c *clock) arm() {
	if c.begun && !c.over && c.expire != nil && c.timer == nil && c.limit > 0 {
		c.timer = time.AfterFunc(c.limit, c.expire)
	}
}

// stop ends the clock.
func (c *clock) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.over = true
	if c.timer != nil {
		c.timer.Stop()
	}
}
