// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"hash/maphash"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// After a fault an engine has a cooldown, in which the picker prefers other engines. It is short, so that a pool does
// not shrink for good. If all engines of a role are in a cooldown, the picker uses them all the same.
const (
	cooldownFirst = time.Second
	cooldownMost  = 8 * time.Second
)

// After a cooldown an engine gets few requests at first, then more and more: if it still fails, few requests meet that,
// and if it is well, its caches fill before it has its full load. This ends by itself, whatever the picker hears of the
// requests.
const (
	recoveredShare = 0.1             // of the picks that would choose the engine, right after a cooldown
	overloadShare  = 1. / 16         // the least that is left to an engine that answers 429 or 503
	overloadEvery  = time.Second     // the share is halved at most so often
	shareTime      = 8 * time.Second // until an engine that answered 429 or 503, or was not ready, has its full share
)

// cooldowns are the cooldowns of one picker's engines and pairs.
type cooldowns struct {
	seed uint64
	n    atomic.Int64 // entries of m: 0 in the common case, and then no pick takes the lock
	mu   sync.RWMutex
	m    map[cooldownKey]cooldown
	hangs
	missing missing
}

// cooldownKey names an engine, or a pair if decode is not "".
type cooldownKey struct{ engine, decode string }

type cooldown struct {
	until  time.Time     // the end of the cooldown; in the past if it has ended or has not begun
	length time.Duration // of the last cooldown, 0 before the first
	last   time.Time     // when the entry was last changed
	salt   uint64        // hash of the key

	// Who drew the faults since the last cooldown or the last good response: a cooldown starts when both have more.
	bodies distinct // of the requests
	peers  distinct // the other engine of the pair

	refused distinct // bodies that drew 429 or 503
	share   share

	timedOut *timedOut // the last attempt that ran out of time; nil: none
	hung     bool      // the cooldown does not end before a synthetic probe or a request has served
	passed   time.Time // when a synthetic probe has served; zero: a request has served since, or there was none
}

// Cooldown is an engine or a pair that a picker prefers others to, for operators.
type Cooldown struct {
	Engine string // the prefill engine of a pair, otherwise the engine
	Decode string // the decode engine of a pair; "": Engine alone
	Left   time.Duration
	// Requests ran out of time there. After Left, which may be 0, a synthetic probe or one request has to be served
	// before others are sent: see [Prober].
	Hung bool
}

// Cooldowns lists the cooldowns that run now, in no order. It returns nil for a picker that [New] has not made.
func Cooldowns(p pdflow.Picker) []Cooldown {
	if own, ok := p.(*picker); ok {
		return own.cooldowns.list(time.Now())
	}
	return nil
}

func (c *cooldowns) list(now time.Time) []Cooldown {
	c.mu.RLock()
	defer c.mu.RUnlock()
	var all []Cooldown
	for key, x := range c.m {
		if left := x.until.Sub(now); left > 0 || x.hung {
			all = append(all, Cooldown{key.engine, key.decode, max(left, 0), x.hung})
		}
	}
	return all
}

// distinct tells whether it has got more than one value. The value 0 stands for more than one.
type distinct struct {
	first uint64
	more  bool
}

func (d *distinct) add(v uint64) {
	switch {
	case v == 0 || d.first != 0 && d.first != v:
		d.more = true
	default:
		d.first = v
	}
}

// share is how many of the picks that would choose an engine may do so. It grows from start to 1 within slow. The zero
// value is 1.
type share struct {
	from  time.Time
	start float64
	slow  time.Duration
}

func (s share) at(now time.Time) float64 {
	if age := now.Sub(s.from); age < s.slow {
		return s.start + (1-s.start)*float64(max(age, 0))/float64(s.slow)
	}
	return 1
}

// seed keeps clients from finding two bodies with the same hash.
var seed = maphash.MakeSeed()

// engine returns the rank that an engine has by what is known of it: good, recovering or coolingDown. An engine that
// recovers is good for a part of the picks, which differ in roll.
func (c *cooldowns) engine(id string, roll uint64) int { return c.rank(cooldownKey{engine: id}, roll) }

// pair returns the rank of a pair. Each of its engines may serve with others meanwhile.
func (c *cooldowns) pair(prefill, decode string, roll uint64) int {
	return c.rank(cooldownKey{prefill, decode}, roll)
}

func (c *cooldowns) rank(key cooldownKey, roll uint64) int {
	if c.n.Load() == 0 {
		return good
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	x, ok := c.m[key]
	if !ok {
		return good
	}
	switch now := time.Now(); {
	case now.Before(x.until), x.hung && !c.triable(&x):
		return coolingDown
	case x.hung: // one request at a time tries it
		return good
	case float64(scramble(roll+x.salt)>>11) >= x.share.at(now)*(1<<53):
		return recovering
	}
	return good
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
//
// A decode engine's fault after prefill has served may be the fault of either engine, or of the way between them (a
// NIXL handshake fails for one pair, while both engines serve with others). It counts for the pair, and for each engine
// only if it also fails with another partner. Responses 429 and 503 say that an engine has too much to do, so they
// lower its share and start no cooldown, which would give all of its load to the others.
func (c *cooldowns) done(o *pdflow.Outcome) {
	if o.Err == nil {
		if o.Session != nil && o.Session.Request != nil {
			c.missing.served(o.Session.Request.Model, o.Prefill.Endpoint, o.Decode.Endpoint)
		}
		if c.n.Load() > 0 {
			c.served(o.Prefill.Endpoint, o.Decode.Endpoint, o.Decode.FirstByte)
		}
		return
	}
	e, body, late := o.Err, drawnBy(o), timeoutOf(o)
	if o.Orphan && o.Session != nil {
		c.fault(cooldownKey{o.Session.Prefill.ID, o.Session.Decode.ID}, body, 0, late)
	}
	switch p, d := o.Prefill.Endpoint, o.Decode.Endpoint; {
	case e.Endpoint == "":
	case e.ModelMissing():
		c.missing.add(e.Endpoint, o.Session.Request.Model)
	case e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable:
		c.overloaded(cooldownKey{engine: e.Endpoint}, bodyOf(o))
	case !e.EngineFault():
	case afterHandoff(o):
		c.handoffFailed(p, d, body, late)
	default:
		c.fault(cooldownKey{engine: e.Endpoint}, body, 0, late)
	}
}

// handoffFailed notes that a pair failed after prefill had served.
func (c *cooldowns) handoffFailed(p, d string, body uint64, late *timedOut) {
	c.fault(cooldownKey{p, d}, body, 0, late)
	c.fault(cooldownKey{engine: d}, body, hashName(p), late)
	c.fault(cooldownKey{engine: p}, body, hashName(d), late)
}

// afterHandoff reports whether decode failed to make use of what prefill gave it: it answered with an error, or not in
// time, as a D does that gets no KV (docs/protocols/mooncake.md §4). A connection that it broke is its own fault.
func afterHandoff(o *pdflow.Outcome) bool {
	e := o.Err
	return e.Leg == pdflow.LegDecode && o.Decode.Endpoint == e.Endpoint &&
		o.Prefill.Endpoint != "" && o.Prefill.Err == nil &&
		(e.Code == pdflow.CodeDecodeFailed && e.Phase == "response" || e.Code == pdflow.CodeTimeout)
}

// drawnBy returns the hash of the body that may have drawn an engine's fault. It returns 0 if no body can have drawn
// it, because the engine could not be reached. All else can be drawn: an error or garbage as the response, a timeout,
// and a connection that the engine breaks. A request's attempts have the same hash.
func drawnBy(o *pdflow.Outcome) uint64 {
	if !o.Err.EngineFault() || o.Err.Phase == "connect" {
		return 0
	}
	return bodyOf(o)
}

func bodyOf(o *pdflow.Outcome) uint64 {
	if o.Session == nil || o.Session.Request == nil {
		return 0
	}
	return max(maphash.Bytes(seed, o.Session.Request.Body()), 1)
}

func hashName(id string) uint64 { return max(maphash.String(seed, id), 1) }

// change changes an entry, which it makes if there is none.
func (c *cooldowns) change(key cooldownKey, do func(x *cooldown, now time.Time)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil {
		c.m = map[cooldownKey]cooldown{}
	}
	now := time.Now()
	c.sweep(now)
	x, ok := c.m[key]
	if !ok {
		x.salt = hashBytes(c.seed, []byte(key.engine+" "+key.decode))
	}
	x.last = now
	do(&x, now)
	c.m[key] = x
	c.n.Store(int64(len(c.m)))
}

// fault starts a cooldown, or only notes the body and the peer if these may have drawn the fault and no others have.
// late is not nil if the attempt ran out of time.
func (c *cooldowns) fault(key cooldownKey, body, peer uint64, late *timedOut) {
	c.change(key, func(x *cooldown, now time.Time) {
		if now.Before(x.until) {
			return // several failures during a cooldown are one fault
		}
		if x.hung && (late == nil || late.since.Before(x.timedOut.since)) ||
			late != nil && late.since.Before(x.passed) {
			return // no news: the engine has answered, or the attempt began before the cooldown, or before a probe
		}
		x.bodies.add(body)
		x.peers.add(peer)
		if late != nil {
			x.note(late)
			c.wakeProbers()
		}
		if !x.hung && !(x.bodies.more && x.peers.more) {
			return
		}
		if x.hung = late != nil && (x.hung || c.mayHang(key)); x.hung {
			x.hang(now)
			return
		}
		x.length = min(max(2*x.length, cooldownFirst), cooldownMost)
		x.start(now)
	})
}

// start starts a cooldown of x.length.
func (x *cooldown) start(now time.Time) {
	x.until, x.bodies, x.peers = now.Add(x.length), distinct{}, distinct{}
	x.share = share{from: x.until, start: recoveredShare, slow: min(x.length, shareTime)}
}

// overloaded halves an engine's share, unless only one body draws such responses.
func (c *cooldowns) overloaded(key cooldownKey, body uint64) {
	c.change(key, func(x *cooldown, now time.Time) {
		x.refused.add(body)
		if was := x.share.at(now); x.refused.more && !(was < 1 && now.Sub(x.share.from) < overloadEvery) {
			x.share = share{from: now, start: max(was/2, overloadShare), slow: shareTime}
		}
	})
}

// ready gives an engine that was not ready its share little by little.
func (c *cooldowns) ready(id string) {
	c.restarted(id)
	c.change(cooldownKey{engine: id}, func(x *cooldown, now time.Time) {
		x.share = share{from: now, start: recoveredShare, slow: shareTime}
	})
}

// follow learns from a new snapshot which engines are ready again.
func (c *cooldowns) follow(old, now *discovery.Snapshot) {
	var was map[string]bool
	for i := range old.Endpoints {
		if e := &old.Endpoints[i]; e.Phase == discovery.PhaseNotReady {
			if was == nil {
				was = map[string]bool{}
			}
			was[e.ID] = true
		}
	}
	for i := range now.Endpoints {
		if e := &now.Endpoints[i]; was[e.ID] && e.Phase == discovery.PhaseReady {
			c.ready(e.ID)
		}
	}
}

// served ends the cooldowns of engines that have served, and drops old entries. An engine that served during its
// cooldown was never out of order. One that recovers keeps its share: it serves what it gets. first is when the
// response began, zero if that is not known.
func (c *cooldowns) served(p, d string, first time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	for _, key := range keysOf(p, d) {
		x, ok := c.m[key]
		switch {
		case !ok:
		case x.timedOut != nil && (p == "" || !first.IsZero() && first.Before(x.timedOut.since)):
			// it says nothing of what ran out of time: its own transfer was over before, or there was none
		case x.hung:
			x.length, x.passed = 0, time.Time{}
			x.recover(now)
			c.m[key] = x
		case now.Before(x.until) || x.share.at(now) == 1 && x.refused == (distinct{}):
			delete(c.m, key)
		default:
			x.length, x.bodies, x.peers, x.timedOut, x.passed = 0, distinct{}, distinct{}, nil, time.Time{}
			c.m[key] = x
		}
	}
	c.sweep(now)
	c.n.Store(int64(len(c.m)))
}

// sweep drops entries that were not changed for a while after the end of their cooldown, so that engines that left the
// set leave nothing behind. The caller holds c.mu.
func (c *cooldowns) sweep(now time.Time) {
	for key, x := range c.m {
		keep := cooldownMost
		switch {
		case x.hung, x.length > cooldownMost:
			keep = hungKept
		case x.timedOut != nil, !x.passed.IsZero():
			keep = timeoutKept
		}
		if now.Sub(x.until) > keep && now.Sub(x.last) > keep {
			delete(c.m, key)
		}
	}
}
