// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/pdflow"
)

// After a fault an engine has a cooldown, in which the picker prefers other engines. It is short, so that a pool does
// not shrink for good. If all engines of a role are in a cooldown, the picker uses them all the same.
const (
	cooldownFirst = time.Second
	cooldownMost  = 8 * time.Second
)

// cooldowns are the cooldowns of one picker's engines and pairs.
type cooldowns struct {
	n  atomic.Int64 // entries of m: 0 in the common case, and then no pick takes the lock
	mu sync.RWMutex
	m  map[cooldownKey]cooldown
}

// cooldownKey names an engine, or a pair if decode is not "". With anyDecode it holds what is suspected of a prefill
// engine.
type cooldownKey struct{ engine, decode string }

const anyDecode = "*"

type cooldown struct {
	until  time.Time     // in the past if the cooldown has ended, or has not begun because one body drew all faults
	length time.Duration // of the last cooldown, 0 before the first
	body   uint64        // hash of the body that drew all faults since the last cooldown; 0: none did
	decode string        // of a suspicion: the decode engine at which the last body timed out
}

// seed keeps clients from finding two bodies with the same hash.
var seed = maphash.MakeSeed()

// engineCooling reports whether an engine is in a cooldown.
func (c *cooldowns) engineCooling(id string) bool { return c.active(cooldownKey{engine: id}) }

// pairCooling reports whether a pair is in a cooldown. Each of its engines may serve with others meanwhile.
func (c *cooldowns) pairCooling(prefill, decode string) bool {
	return c.active(cooldownKey{prefill, decode})
}

func (c *cooldowns) active(key cooldownKey) bool {
	if c.n.Load() == 0 {
		return false
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	x, ok := c.m[key]
	return ok && time.Now().Before(x.until)
}

// done learns from an attempt. An engine's fault starts the engine's cooldown, and an orphan starts the pair's; each
// further fault doubles the length. A good response ends the cooldowns of the engines that served it, and the doubling.
//
// Somebody may send a body that draws a fault from every engine. If one such fault were enough, the cooldowns would
// move nearly all load to the engine that this body has not met yet. So a fault that the body may have drawn counts
// only if another body draws one as well, within cooldownMost and before the engine serves a request. A client that
// sends a new bad body each time can still start a cooldown where its faults come faster than the engine's good
// responses. The engine's next good response ends that, and a cooldown of all engines of a role changes nothing. Good
// responses of encode engines are not told apart here: for these only the time counts. An orphan that is no engine's
// fault (the client left, or prefill refused the request) starts its pair's cooldown at once: decode surely holds
// something for that prefill.
func (c *cooldowns) done(o *pdflow.Outcome) {
	if o.Err == nil {
		if c.n.Load() > 0 {
			p, d := o.Prefill.Endpoint, o.Decode.Endpoint
			c.forget(cooldownKey{engine: p}, cooldownKey{engine: d}, cooldownKey{p, d}, cooldownKey{p, anyDecode})
		}
		return
	}
	body := drawnBy(o)
	if o.Orphan && o.Session != nil {
		c.start(cooldownKey{o.Session.Prefill.ID, o.Session.Decode.ID}, body)
	}
	if o.Err.EngineFault() && o.Err.Endpoint != "" && !c.prefillsFault(o, body) {
		c.start(cooldownKey{engine: o.Err.Endpoint}, body)
	}
}

// prefillsFault reports whether decode's timeout is the prefill engine's fault. A D that gets no KV waits without a
// sign, so the fault of a P that sends none shows on all of its Ds (docs/protocols/mooncake.md §4). If two different Ds
// have timed out with one P, on two different bodies and without a good response between, P's cooldown starts, and D's
// does not.
func (c *cooldowns) prefillsFault(o *pdflow.Outcome, body uint64) bool {
	if o.Err.Code != pdflow.CodeTimeout || o.Err.Leg != pdflow.LegDecode || body == 0 || o.Session.Prefill.ID == "" {
		return false
	}
	key := cooldownKey{o.Session.Prefill.ID, anyDecode}
	c.mu.Lock()
	now := time.Now()
	c.sweep(now)
	last := c.m[key]
	if c.m == nil {
		c.m = map[cooldownKey]cooldown{}
	}
	c.m[key] = cooldown{until: now, body: body, decode: o.Err.Endpoint}
	c.n.Store(int64(len(c.m)))
	c.mu.Unlock()
	if last.body == 0 || last.body == body || last.decode == o.Err.Endpoint {
		return false
	}
	c.start(cooldownKey{engine: key.engine}, 0)
	return true
}

// drawnBy returns the hash of the body that may have drawn an engine's fault. It returns 0 if no body can have drawn
// it, because the engine could not be reached. All else can be drawn: an error or garbage as the response, a timeout,
// and a connection that the engine breaks. A request's attempts have the same hash.
func drawnBy(o *pdflow.Outcome) uint64 {
	if !o.Err.EngineFault() || o.Err.Phase == "connect" || o.Session == nil || o.Session.Request == nil {
		return 0
	}
	return max(maphash.Bytes(seed, o.Session.Request.Body()), 1)
}

// start starts a cooldown, or only notes the body if that may have drawn the fault and no other body has.
func (c *cooldowns) start(key cooldownKey, body uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil {
		c.m = map[cooldownKey]cooldown{}
	}
	now := time.Now()
	c.sweep(now)
	x := c.m[key]
	switch {
	case now.Before(x.until):
		return // several failures during a cooldown are one fault
	case body != 0 && (x.body == 0 || x.body == body):
		x.until, x.body = now, body
	default:
		x.length = min(max(2*x.length, cooldownFirst), cooldownMost)
		x.until, x.body = now.Add(x.length), 0
	}
	c.m[key] = x
	c.n.Store(int64(len(c.m)))
}

// forget ends the cooldowns of engines that have served, and drops old entries.
func (c *cooldowns) forget(keys ...cooldownKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, key := range keys {
		delete(c.m, key)
	}
	c.sweep(time.Now())
	c.n.Store(int64(len(c.m)))
}

// sweep drops entries whose cooldown ended more than cooldownMost ago, so that engines that left the set leave nothing
// behind. The caller holds c.mu.
func (c *cooldowns) sweep(now time.Time) {
	for key, x := range c.m {
		if now.Sub(x.until) > cooldownMost {
			delete(c.m, key)
		}
	}
}
