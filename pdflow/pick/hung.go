// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// A pair whose transfer never ends, or an engine whose scheduler stands still, costs each client the whole of a
// timeout, although both engines answer their health probes. So a cooldown after timeouts is longer than others, and
// does not end by itself: something has to be served first. That is a synthetic probe if there is a [Prober], and else
// a request, but one at a time.
const (
	hungFirst   = cooldownMost
	hungMost    = 4 * time.Minute
	hungKept    = 4 * hungMost // a cooldown that comes so long after the last one does not double it
	timeoutKept = hungMost     // a timeout without a second one, or a good response, is forgotten
)

// hangs is what cooldowns knows of pairs and engines that ran out of time.
type hangs struct {
	probers atomic.Int64
	wake    chan struct{} // nil without a prober; c.mu guards it

	pairs    int            // that the engines can form, by their groups; c.mu guards it
	partners map[string]int // of each engine, likewise
}

// timedOut is an attempt that ran out of time, and what came of it.
type timedOut struct {
	prefill, decode  string    // the pair
	model, connector string    // of the request
	since            time.Time // when the attempt began, or the cooldown after it

	trial   time.Time // a request or a probe is under way that decides, since then; zero: none
	refused bool      // the engines refuse probes, so a request decides
	probed  time.Time // when the last probe ended; zero: there was none
}

// trialMost is how long a trial keeps others away: longer than the default of Timeouts.Decode. One whose stream still
// runs then has been served.
const trialMost = 12 * time.Minute

func (t *timedOut) tried() bool { return !t.trial.IsZero() && time.Since(t.trial) < trialMost }

// timeoutOf returns what is known of an attempt that ran out of time at a pair; nil for any other.
func timeoutOf(o *pdflow.Outcome) *timedOut {
	s := o.Session
	if o.Err.Code != pdflow.CodeTimeout || !o.Err.EngineFault() || s == nil || s.Prefill.ID == "" || s.Decode.ID == "" {
		return nil
	}
	t := &timedOut{prefill: s.Prefill.ID, decode: s.Decode.ID, connector: o.Connector, since: s.CreatedAt}
	if t.since.IsZero() {
		t.since = time.Now()
	}
	if s.Request != nil && len(s.Request.Model) <= missingName {
		t.model = strings.Clone(s.Request.Model) // else the client's whole body would be kept
	}
	return t
}

// note keeps the newest timeout.
func (x *cooldown) note(late *timedOut) {
	now := *late
	if x.timedOut != nil { // a trial that others hold stays theirs
		now.refused, now.probed = x.timedOut.refused, x.timedOut.probed
	}
	x.timedOut = &now
}

// hang starts a cooldown after timeouts. Its length is drawn from a tenth around what doubles, so that several gateways
// do not probe together.
func (x *cooldown) hang(now time.Time) {
	x.length = min(max(2*x.length, hungFirst), hungMost)
	length := x.length
	x.start(now)
	x.until = now.Add(length*9/10 + rand.N(length/5)) //nolint:gosec // jitter, guards nothing
	x.timedOut.since = now
	// After a probe had served, requests ran out of time again: it does not show what is wrong.
	x.timedOut.refused = x.timedOut.refused || !x.passed.IsZero()
}

// recover ends a cooldown after timeouts: what has served gets more and more picks.
func (x *cooldown) recover(now time.Time) {
	x.hung, x.timedOut, x.until, x.last = false, nil, now, now
	x.bodies, x.peers = distinct{}, distinct{}
	x.share = share{from: now, start: recoveredShare, slow: shareTime}
}

// triable reports whether a request may be sent to what has hung and whose cooldown is over. The caller holds c.mu.
func (c *cooldowns) triable(x *cooldown) bool {
	return !x.timedOut.tried() && (c.probers.Load() == 0 || x.timedOut.refused)
}

// mayHang reports whether a cooldown may last until something is served. Together such cooldowns take at most half of
// the pairs: where more run out of time, their requests are at fault, or all have too much to do. The caller holds
// c.mu.
func (c *cooldowns) mayHang(key cooldownKey) bool {
	taken := c.weight(key)
	for other, x := range c.m {
		if x.hung {
			taken += c.weight(other)
		}
	}
	return 2*taken <= c.pairs
}

// hangsNow reports whether an engine, and not only a pair of it, has hung and has not been served at since.
func (c *cooldowns) hangsNow(id string) bool {
	if c.n.Load() == 0 {
		return false
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.m[cooldownKey{engine: id}].hung
}

// weight is how many pairs a cooldown takes.
func (c *cooldowns) weight(key cooldownKey) int {
	if key.decode != "" {
		return 1
	}
	return c.partners[key.engine]
}

// try marks what has hung among the engines of a pick as being tried by it. release ends that: it must follow, unless
// it is nil, as where nothing has hung. ok is false if another pick has been faster. p is "" if d serves alone.
func (c *cooldowns) try(p, d string) (release func(), ok bool) {
	if c.n.Load() == 0 {
		return nil, true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var mine []*timedOut
	now := time.Now()
	for _, key := range keysOf(p, d) {
		x := c.m[key]
		if !x.hung || now.Before(x.until) { // the latter is picked only where nothing better is there
			continue
		}
		if x.timedOut.tried() {
			return nil, false
		}
		if c.triable(&x) {
			mine = append(mine, x.timedOut)
		}
	}
	if mine == nil {
		return nil, true
	}
	return c.trying(mine), true
}

// keysOf are what a pair's attempts count for.
func keysOf(p, d string) [3]cooldownKey { return [...]cooldownKey{{engine: p}, {engine: d}, {p, d}} }

// trying begins a trial. The caller holds c.mu, and release takes it.
func (c *cooldowns) trying(all []*timedOut) (release func()) {
	for _, t := range all {
		t.trial = time.Now()
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, t := range all {
			t.trial = time.Time{}
		}
		c.wakeProbers()
	}
}

// restarted lets what has hung be tried at once with an engine that is ready again.
func (c *cooldowns) restarted(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, x := range c.m {
		if x.hung && (key.engine == id || key.decode == id) {
			x.until, x.timedOut.probed = time.Now(), time.Time{}
			c.m[key] = x
			c.wakeProbers()
		}
	}
}

// count learns from a new snapshot how many pairs there can be. What connectors and attributes forbid is not known
// here, so it may be fewer.
func (c *cooldowns) count(snap *discovery.Snapshot) {
	type group struct{ prefills, decodes int }
	groups := map[string]group{}
	ready := func(e *discovery.Endpoint, role discovery.Role) int {
		if e.Phase == discovery.PhaseReady && e.Role.Has(role) {
			return 1
		}
		return 0
	}
	for i := range snap.Endpoints {
		e := &snap.Endpoints[i]
		g := groups[e.Group]
		g.prefills, g.decodes = g.prefills+ready(e, discovery.RolePrefill), g.decodes+ready(e, discovery.RoleDecode)
		groups[e.Group] = g
	}
	pairs, partners := 0, make(map[string]int, len(snap.Endpoints))
	for i := range snap.Endpoints {
		e := &snap.Endpoints[i]
		g := groups[e.Group]
		pairs += ready(e, discovery.RolePrefill) * g.decodes
		partners[e.ID] = ready(e, discovery.RolePrefill)*g.decodes + ready(e, discovery.RoleDecode)*g.prefills
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pairs, c.partners = pairs, partners
}

// wakeProbers has the probers look at what ran out of time. The caller holds c.mu.
func (c *cooldowns) wakeProbers() {
	if c.wake != nil {
		close(c.wake)
		c.wake = nil
	}
}
