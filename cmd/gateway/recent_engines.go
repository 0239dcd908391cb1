// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"slices"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

const enginesKept = 512 // engines whose last hour is kept; the one that was used longest ago leaves its place

// engineFault is what an engine does wrong.
type engineFault int

const (
	faultFailing engineFault = iota // it breaks connections, answers with errors or garbage, or not in time
	faultCut                        // it breaks streams off
	faultBusy                       // it answers 429 or 503
	faultLease                      // its KV was read by nobody within its lease
	faultLacks                      // it says that it does not serve the model
	faultSlow                       // its first tokens come late
	faultKinds
)

// markRules say when an engine gets the mark of a fault: for at least so many attempts of the last minute, which are at
// least such a share, or for half of them. The mark ends below half of both.
var markRules = [faultKinds]struct {
	word  string
	least float64
	share float64
}{
	faultFailing: {"failing", 3, .02},
	faultCut:     {"cut streams", 3, .02},
	faultBusy:    {"overloaded", 3, .02},
	faultLease:   {"lease over", 3, .02},
	faultLacks:   {"lacks the model", 3, .02},
	faultSlow:    {"slow", 5, .1},
}

// marked reports whether n attempts of so many are enough for a mark that the engine has, or has not.
func (f engineFault) marked(n, of uint32, has bool) bool {
	rule := markRules[f]
	if has {
		rule.least, rule.share = rule.least/2, rule.share/2
	}
	enough := float64(n) >= rule.least && float64(n) >= rule.share*float64(of)
	return n > 0 && (enough || f != faultSlow && f != faultLease && 2*n >= of)
}

// An engine's first token is late if it takes longer than lateTimes the percentile lateThan of an other engine of its
// role, and lateLeast more. That other one is the middle of those that have had lateKnown first tokens in the last
// minute. Of engines that are alike fewer than one in twenty are late, also where lengths of prompts differ much.
const (
	lateThan  = .9
	lateTimes = 2
	lateLeast = 50. // ms
	lateKnown = 10
)

// engineCount is what an engine did in a time.
type engineCount struct {
	attempts uint32
	faults   [faultKinds]uint32 // that are the engine's own; not faultSlow and faultLease
	leases   uint32             // that ended before decode read the KV, of attempts that the gateway had not given up
	shared   uint32             // decode failed with what prefill gave it: the fault of either
	// its own part of the time to the first token: of prefill until its response, of decode from there on, or from
	// the beginning of its leg where that is later
	first histogram
}

func (c *engineCount) add(o *engineCount) {
	c.attempts, c.shared, c.leases = c.attempts+o.attempts, c.shared+o.shared, c.leases+o.leases
	for i, n := range o.faults {
		c.faults[i] += n
	}
	c.first.add(&o.first)
}

// engineWindow is an engine's last minute, and of its last hour what went wrong.
type engineWindow struct {
	role   discovery.Role
	used   time.Time
	slots  [minuteSlots]engineCount
	past   [hourMinutes]struct{ attempts, bad uint32 } // bad: failed, or late
	limit  float64                                     // ms after which a first token is late; 0: not known
	blamed bool                                        // for the faults that it shares
	since  [faultKinds]time.Time                       // it has the mark; zero: it has not

	unread   uint32    // attempts that may have left KV to its lease, and whose lease has not been seen to end
	unreadAt time.Time // the last of them
}

// unreadKept is how long a lease may last: 480 s in vLLM before 0.22.
const unreadKept = 10 * time.Minute

// readLeases is told how many leases have ended without a read, as prefill engines count them. Those of attempts that
// failed before decode's response are no news: nobody was to read their KV any more.
func (w *windows) readLeases(ended map[string]float64, now time.Time) {
	w.advance(now)
	for id, n := range ended {
		e := w.engines[id]
		before, known := w.leases[id]
		if e == nil || !known || n <= before {
			continue // nobody has used it, or it has begun to count anew
		}
		if now.Sub(e.unreadAt) > unreadKept {
			e.unread = 0
		}
		more := uint32(n - before)
		given := min(e.unread, more)
		e.unread -= given
		e.slots[w.slot%minuteSlots].leases += more - given
	}
	w.leases = ended
}

// struck returns how many of a minute's attempts a fault struck, or of its first tokens.
func (e *engineWindow) struck(kind engineFault, c *engineCount) (n, of uint32) {
	switch {
	case kind == faultFailing && e.blamed:
		return c.faults[kind] + c.shared, c.attempts
	case kind == faultSlow && e.limit > 0:
		return c.first.over(e.limit), c.first.count()
	case kind == faultLease:
		return c.leases, c.attempts
	}
	return c.faults[kind], c.attempts
}

// failed counts the attempts for whose failure the engine is to blame.
func (e *engineWindow) failed(c *engineCount) (n uint32) {
	for _, of := range c.faults {
		n += of
	}
	if e.blamed {
		n += c.shared
	}
	return n
}

// bad counts the attempts that failed or were late.
func (e *engineWindow) bad(c *engineCount) uint32 {
	late, _ := e.struck(faultSlow, c)
	return e.failed(c) + late
}

func (e *engineWindow) ends(slot, minute int64) {
	c, p := &e.slots[slot], &e.past[minute]
	if c.attempts == 0 {
		return
	}
	p.attempts, p.bad = p.attempts+c.attempts, p.bad+e.bad(c)
}

func (e *engineWindow) begins(slot, minute int64, newMinute bool) {
	e.slots[slot] = engineCount{}
	if newMinute {
		e.past[minute].attempts, e.past[minute].bad = 0, 0
	}
}

func (e *engineWindow) minute() (c engineCount) {
	for i := range e.slots {
		c.add(&e.slots[i])
	}
	return c
}

// engine returns the newest slot of an engine.
func (w *windows) engine(e *discovery.Endpoint, now time.Time) *engineCount {
	x := w.engines[e.ID]
	if x == nil {
		if w.engines == nil {
			w.engines = map[string]*engineWindow{}
		}
		if len(w.engines) == enginesKept {
			idle := e.ID
			for id, other := range w.engines {
				if first := w.engines[idle]; first == nil || other.used.Before(first.used) {
					idle = id
				}
			}
			delete(w.engines, idle)
		}
		x = &engineWindow{}
		w.engines[e.ID] = x
	}
	x.role, x.used = e.Role, now
	return &x.slots[w.slot%minuteSlots]
}

// engineAttempt counts an attempt for the engines that it was sent to.
func (w *windows) engineAttempt(o *pdflow.Outcome, now time.Time) {
	s := o.Session
	both := o.Prefill.Endpoint != "" && o.Decode.Endpoint != ""
	if p := &o.Prefill; p.Endpoint == s.Prefill.ID && p.Endpoint != "" {
		c := w.engine(&s.Prefill, now)
		c.attempts++
		if p.Err == nil && p.End.After(p.Start) {
			c.first.observe(p.End.Sub(p.Start))
		}
		if o.Err != nil && o.Decode.FirstByte.IsZero() {
			x := w.engines[s.Prefill.ID]
			x.unread, x.unreadAt = x.unread+1, now
		}
	}
	if d := &o.Decode; d.Endpoint == s.Decode.ID && d.Endpoint != "" {
		c := w.engine(&s.Decode, now)
		c.attempts++
		// a response that is no stream has its first byte when its last token is made
		if s.Request != nil && s.Request.Stream && o.Resumed == 0 && !d.FirstByte.IsZero() {
			begin := d.Start
			if both && o.Prefill.End.After(begin) && o.Prefill.End.Before(d.FirstByte) {
				begin = o.Prefill.End
			}
			c.first.observe(d.FirstByte.Sub(begin))
		}
	}
	e := o.Err
	if e == nil || e.Endpoint == "" {
		return
	}
	kind := faultFailing
	switch {
	case e.ModelMissing():
		if s.Request == nil || s.Request.Model != w.model { // clients name what they like
			return
		}
		kind = faultLacks
	case e.Status == http.StatusTooManyRequests || e.Status == http.StatusServiceUnavailable:
		kind = faultBusy
	case !e.EngineFault():
		return
	case e.Code == pdflow.CodeStreamBroken:
		kind = faultCut
	case both && e.Leg == pdflow.LegDecode && o.Prefill.Err == nil &&
		(e.Code == pdflow.CodeDecodeFailed && e.Phase == "response" || e.Code == pdflow.CodeTimeout):
		w.engine(&s.Prefill, now).shared++
		w.engine(&s.Decode, now).shared++
		return
	}
	switch e.Endpoint {
	case s.Prefill.ID:
		w.engine(&s.Prefill, now).faults[kind]++
	case s.Decode.ID:
		w.engine(&s.Decode, now).faults[kind]++
	default:
		for i := range s.Encode {
			if s.Encode[i].ID == e.Endpoint { // a request has many legs of these, and only one that failed is told
				c := w.engine(&s.Encode[i], now)
				c.attempts++
				c.faults[kind]++
				return
			}
		}
	}
}

// leaseRemedy is what an operator does where leases end.
const leaseRemedy = "decode reads KV later than prefill keeps it, and may get another prompt's: raise the engines' " +
	"kv_lease_duration, or find the decode engine that is slow, see docs/runbook.md#pdhandoffsunread"

// mark gives each engine the marks of its last minute, and takes away those that are over.
func (w *windows) mark(now time.Time) {
	minutes := make(map[string]*engineCount, len(w.engines))
	var shares, firsts standing
	late := make(map[string]float64, len(w.engines)) // the percentile lateThan
	for id, e := range w.engines {
		c := e.minute()
		minutes[id] = &c
		if c.attempts > 0 {
			shares.add(e.role, c.sharedShare())
		}
		if c.first.count() >= lateKnown {
			late[id] = c.first.quantile(lateThan)
			firsts.add(e.role, late[id])
		}
	}
	shares.sort()
	firsts.sort()
	w.blame(minutes, &shares)
	for id, e := range w.engines {
		c, mine := minutes[id], late[id] // 0: not known, and none of the others
		e.limit = 0
		if usual := firsts.others(e.role, mine); usual >= 0 {
			e.limit = lateTimes*usual + lateLeast
		}
		for kind := range faultKinds {
			n, of := e.struck(kind, c)
			has := !e.since[kind].IsZero()
			switch marked := kind.marked(n, of, has); {
			case has && !marked:
				e.since[kind] = time.Time{}
				w.log.Info("engine is well again", "model", w.model, "endpoint", id, "fault", markRules[kind].word)
			case marked && !has:
				e.since[kind] = now
				more := []any{}
				if kind == faultLease {
					more = []any{"remedy", leaseRemedy}
				}
				w.log.Warn("engine is not well", append([]any{"model", w.model, "endpoint", id,
					"fault", markRules[kind].word, "attempts", n, "of", of}, more...)...)
			}
		}
	}
}

// blame says which engines the shared faults are of. An engine that is sick has more of them than the others of its
// role, while those that it worked with have as many as each other. If none stands out, it is the one that is alone in
// its role, and otherwise each of them.
func (w *windows) blame(minutes map[string]*engineCount, shares *standing) {
	standsOut, alone := false, false
	for id, e := range w.engines {
		mine := minutes[id].sharedShare()
		usual := shares.others(e.role, mine)
		e.blamed = mine > 0 && usual >= 0 && mine > 2*usual
		standsOut, alone = standsOut || e.blamed, alone || usual < 0 && mine > 0
	}
	for id, e := range w.engines {
		mine := minutes[id].sharedShare()
		e.blamed = e.blamed || !standsOut && mine > 0 && (!alone || shares.others(e.role, mine) < 0)
	}
}

func (c *engineCount) sharedShare() float64 { return float64(c.shared) / float64(max(c.attempts, 1)) }

// standing has a value of each engine, by role.
type standing map[discovery.Role][]float64

func (s *standing) add(role discovery.Role, v float64) {
	if *s == nil {
		*s = standing{}
	}
	(*s)[role] = append((*s)[role], v)
}

func (s standing) sort() {
	for _, values := range s {
		slices.Sort(values)
	}
}

// others returns the middle value of the other engines of a role, of two the lower one; -1 if there is none. mine is
// the value of the engine itself.
func (s standing) others(role discovery.Role, mine float64) float64 {
	values := s[role]
	at, among := slices.BinarySearch(values, mine)
	n := len(values)
	if among {
		n--
	}
	if n == 0 {
		return -1
	}
	middle := (n - 1) / 2
	if among && middle >= at {
		middle++
	}
	return values[middle]
}

// liveRecent is what an engine did in the last minute, and which share of its attempts, in percent, failed or were late
// in each minute of the last hour: the oldest first, -1 without an attempt.
type liveRecent struct {
	Attempts uint32       `json:"attempts"`
	Failed   uint32       `json:"failed"`          // for which the engine is to blame
	First    *percentiles `json:"first,omitempty"` // its part of the time to the first token
	Marks    []liveMark   `json:"marks,omitempty"`
	Limit    float64      `json:"limit,omitempty"` // ms after which its first token is late; 0: not known
	Past     []int        `json:"past"`
}

// liveMark is a word for what an engine does wrong, since when, and for how many of its attempts, or of its first
// tokens where it is slow.
type liveMark struct {
	Word  string    `json:"word"`
	Since time.Time `json:"since"`
	Count uint32    `json:"count"`
	Of    uint32    `json:"of"`
}

// engineSpans returns what is shown of each engine. It is called after spans.
func (w *windows) engineSpans() map[string]*liveRecent {
	all := make(map[string]*liveRecent, len(w.engines))
	current := w.slot / minuteSlots
	for id, e := range w.engines {
		c := e.minute()
		x := &liveRecent{Attempts: c.attempts, Failed: e.failed(&c), First: c.first.percentiles(),
			Limit: milli(e.limit), Past: []int{}}
		for kind, since := range e.since {
			if n, of := e.struck(engineFault(kind), &c); !since.IsZero() {
				x.Marks = append(x.Marks, liveMark{markRules[kind].word, since, n, of})
			}
		}
		for m := max(current-hourMinutes+1, w.begin.Unix()/60); m <= current; m++ {
			p := e.past[m%hourMinutes]
			if m == current {
				newest := &e.slots[w.slot%minuteSlots]
				p.attempts, p.bad = p.attempts+newest.attempts, p.bad+e.bad(newest)
			}
			percent := -1
			if p.attempts > 0 {
				percent = int(min(100, 100*p.bad/p.attempts))
			}
			x.Past = append(x.Past, percent)
		}
		all[id] = x
	}
	return all
}
