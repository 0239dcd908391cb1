// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"cmp"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"
)

// hostKey names connections that can replace each other.
type hostKey struct {
	secure bool
	host   string // with the port if the URL has one
}

func keyOf(req *http.Request) hostKey {
	return hostKey{secure: req.URL.Scheme == "https", host: req.URL.Host}
}

// pool keeps idle connections. It has no goroutine. While there are connections, a timer closes those that were idle
// for too long.
type pool struct {
	limit   int           // of each host
	timeout time.Duration // 0 means none
	sure    time.Duration // a connection that was idle for less is surely alive

	mu     sync.Mutex
	closed bool
	hosts  map[hostKey][]*conn // the longest idle first
	timer  *time.Timer
	armed  bool
}

// take returns a quiet connection; nil if there is none.
func (p *pool) take(key hostKey) *conn {
	for {
		now := time.Now()
		c := p.pop(key, now)
		if c == nil || (p.timeout == 0 || now.Sub(c.since) < p.timeout) && !tooOld(c.ends, now) && c.quiet() {
			return c
		}
		c.closeIdle()
	}
}

func (p *pool) pop(key hostKey, now time.Time) *conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	idle := p.hosts[key]
	i := p.choose(idle, now)
	if i < 0 {
		return nil
	}
	c := idle[i]
	p.hosts[key] = slices.Delete(idle, i, i+1)
	c.begun = now
	if c.unpaused++; now.Sub(c.since) >= minPause {
		c.unpaused, c.paused = 0, now
	}
	return c
}

// choose returns which of an engine's idle connections serves next, -1 if none may. Of those that had a pause and are
// surely alive it is any: the one used last would keep the load at one of the processes behind the engine's port. Else
// it is the one used last that may serve without a pause, and of those that are idle for long the one used last, since
// the engine is least likely to close it now.
func (p *pool) choose(idle []*conn, now time.Time) int {
	sure, paused := idleSince(idle, now.Add(-p.sure)), idleSince(idle, now.Add(-minPause))
	if sure < paused {
		return sure + rand.IntN(paused-sure) //nolint:gosec // spreads load, guards nothing
	}
	const some = 16 // to look at all of a large burst's would take long
	last, first := -1, max(paused, len(idle)-some)
	for i, c := range slices.Backward(idle[first:]) {
		if c.first() {
			return first + i
		}
		if last < 0 && c.mayServe(now) {
			last = first + i
		}
	}
	switch {
	case last >= 0:
		return last
	case len(idle)-paused > maxLong, len(idle)-paused > maxPausing && !idle[paused].long:
		return paused
	}
	return paused - 1
}

// idleSince returns the index of the first connection that has been idle since t or later.
func idleSince(idle []*conn, t time.Time) int {
	if len(idle) == 0 || !idle[0].since.Before(t) { // most often
		return 0
	}
	i, _ := slices.BinarySearchFunc(idle, t, func(c *conn, t time.Time) int { return c.since.Compare(t) })
	return i
}

// put keeps c, or closes it if the pool is full.
func (p *pool) put(c *conn) {
	c.since = time.Now()
	c.long = c.since.Sub(c.begun) >= long
	p.mu.Lock()
	idle := p.hosts[c.key]
	if p.closed || len(idle) >= p.limit || tooOld(c.ends, c.since) {
		p.mu.Unlock()
		c.close()
		return
	}
	if p.hosts == nil {
		p.hosts = make(map[hostKey][]*conn)
	}
	p.hosts[c.key] = append(idle, c)
	p.arm()
	p.mu.Unlock()
}

// arm starts the timer unless it runs. It may fire up to one period after the first connection is due. That is no
// fault: take does not return a connection that is due, and moving the timer would cost time in each request.
func (p *pool) arm() {
	if p.armed {
		return
	}
	p.armed = true
	if p.timer == nil {
		p.timer = time.AfterFunc(p.period(), p.sweep)
	} else {
		p.timer.Reset(p.period())
	}
}

// period is how long a connection may be idle, and without a limit how long one that the engine has closed may stay.
func (p *pool) period() time.Duration { return cmp.Or(p.timeout, defaultIdleTimeout) }

// sweep closes connections that were idle for too long, or that the engine closed. It starts the timer again for the
// next one, but not for each by itself: the thousands of a large fleet come due one after another. It has the lock for
// one engine's connections at a time, since to look at one is a system call.
func (p *pool) sweep() {
	p.mu.Lock()
	if p.closed {
		p.armed = false
		p.mu.Unlock()
		return
	}
	keys := slices.Collect(maps.Keys(p.hosts))
	p.mu.Unlock()
	next := p.period()
	for _, key := range keys {
		next = min(next, p.sweepHost(key))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.armed = len(p.hosts) > 0 && !p.closed; p.armed {
		p.timer.Reset(max(next, p.period()/4))
	}
}

// sweepHost sweeps one engine's connections, and returns when the first of those that stay is due.
func (p *pool) sweepHost(key hostKey) (next time.Duration) {
	var expired []*conn
	next = p.period()
	now := time.Now()
	p.mu.Lock()
	idle := p.hosts[key]
	kept := idle[:0]
	for _, c := range idle {
		left := p.period()
		if p.timeout > 0 {
			left = p.timeout - now.Sub(c.since)
		}
		// one that was just used was quiet then
		if left <= 0 || (p.timeout == 0 || left < p.timeout/2) && !c.quiet() {
			expired = append(expired, c)
			continue
		}
		next = min(next, left)
		kept = append(kept, c)
	}
	clear(idle[len(kept):])
	if len(kept) > 0 {
		p.hosts[key] = kept
	} else {
		delete(p.hosts, key)
	}
	p.mu.Unlock()
	for _, c := range expired {
		c.closeIdle()
	}
	return next
}

// drop closes the idle connections of one host.
func (p *pool) drop(key hostKey) {
	p.mu.Lock()
	idle := p.hosts[key]
	delete(p.hosts, key)
	p.mu.Unlock()
	for _, c := range idle {
		c.close()
	}
}

// closeIdle closes all idle connections. With final the pool keeps none from then on.
func (p *pool) closeIdle(final bool) {
	p.mu.Lock()
	p.closed = p.closed || final
	hosts := p.hosts
	p.hosts = nil
	if p.timer != nil {
		p.timer.Stop()
		p.armed = false
	}
	p.mu.Unlock()
	for _, idle := range hosts {
		for _, c := range idle {
			c.close()
		}
	}
}
