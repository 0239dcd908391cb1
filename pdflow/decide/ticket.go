// SPDX-License-Identifier: Apache-2.0

package decide

import (
	"net/http"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/pdflow"
)

// ticket is what one attempt holds until it has ended, and what was predicted of it. It goes back to the pool after its
// last report.
type ticket struct {
	s            *shared
	at           time.Time
	engines      [2]*engine
	prompt       int64   // tokens
	own          int64   // of them, those that prefill computes
	perToken     float64 // seconds that a token's KV takes from engine to engine
	step         Speed   // of the decode engine, as the host says, and scaled
	scale        float64
	roomy        bool  // the decode engine has memory for it, so that nothing but its transfer waits
	until, takes int64 // when its prefill will be over where it is served alone, and for how long: see books.clock
	seen         seen
	decided      bool // by the policy
	action       Action
	reason       string
	recorded     *Recorded    // nil: the decision is not kept
	prefills     atomic.Bool  // the prefill leg counts
	here         atomic.Int32 // whether the decode engine has the request
	reports      atomic.Int32 // that are to come
	inner        func(*pdflow.Outcome)
	innerPrefill func(*pdflow.LegOutcome)
	done         func(*pdflow.Outcome)    // made once per ticket, so that a pick allocates nothing
	prefillDone  func(*pdflow.LegOutcome) //
}

// count counts a pick at its engines until it has ended.
func (s *shared) count(x *scratch, out *pdflow.Pick, decided bool) pdflow.Pick {
	if out.Decode.URL == nil {
		return *out
	}
	t, _ := s.tickets.Get().(*ticket)
	if t == nil {
		t = &ticket{s: s}
		t.done, t.prefillDone = t.end, t.endPrefill
	}
	now, clock := x.now, s.books.clock(x.now)
	d := s.books.engine(out.Decode.ID, now)
	t.at, t.prompt, t.decided = now, int64(x.in.Prompt), decided
	t.action, t.reason = x.decision.Action, x.decision.Reason
	t.engines, t.seen = [2]*engine{decodeRole: d}, seen{decode: d, alone: out.Prefill.URL == nil}
	if decided {
		t.seen.ttft, t.seen.itl = x.decision.TTFT.Seconds(), x.decision.ITL.Seconds()
	}
	t.step = Speed{}
	from, to := x.candidate(prefillRole, out.Prefill.ID), x.candidate(decodeRole, out.Decode.ID)
	if to != nil && s.o.Engine != nil {
		t.step = to.Speed
		t.scale, t.seen.saidITL = s.books.ledger.scales.at(decodeRole), t.seen.itl
	}
	t.inner, t.innerPrefill = out.Done, out.PrefillDone
	if t.recorded, x.recorded = x.recorded, nil; t.recorded != nil {
		t.recorded.Prefill, t.recorded.Decode = out.Prefill.ID, out.Decode.ID
	}
	t.reports.Store(1)
	cached := to.has(x.in.Prompt)
	t.seen.fetched = float64(t.prompt) - cached
	t.perToken = 0
	t.roomy = to == nil || to.Queue == 0 && (to.KV.Total == 0 || to.KV.Free > 4*x.in.Prompt)
	if x.in.Link > 0 {
		t.perToken = float64(x.in.TokenBytes) / x.in.Link
	}
	d.used.Store(clock)
	s.books.prompts.add(t.prompt)
	if t.seen.alone {
		t.seen.crowd = float64(d.running.Add(1))
		t.here.Store(there)
		s.has(d, 1, now)
		d.context.Add(t.prompt)
		t.own = max(t.prompt-int64(cached), 1)
		var before float64
		before, t.until, t.takes = d.occupy(float64(t.own), d.known(&s.books, now), clock)
		t.seen.work = float64(t.own) + before
		d.beside.add(float64(t.own), now)
	} else {
		t.seen.crowd = float64(d.coming.Add(1) + d.running.Load())
		d.arriving.Add(t.prompt)
		d.unsent.Add(int64(t.seen.fetched))
		p := s.books.engine(out.Prefill.ID, now)
		t.own = max(t.prompt-int64(from.has(x.in.Prompt)), 1)
		s.books.works.add(t.own)
		t.engines[prefillRole], t.seen.prefill = p, p
		p.unsent.Add(int64(t.seen.fetched))
		t.seen.work = float64(p.prefilling.Add(t.own))
		if from != nil {
			t.seen.saidPrefill = t.seen.work * from.Speed.PerPrompt / s.books.ledger.scales.at(prefillRole)
		}
		p.prefills.Add(1)
		s.has(p, 1, now)
		if t.here.Store(coming); x.early {
			t.here.Store(there)
			s.has(d, 1, now)
		}
		p.used.Store(clock)
		t.prefills.Store(true)
		t.reports.Store(2)
		out.PrefillDone = t.prefillDone
	}
	out.Done = t.done
	return *out
}

// occupy adds prompt tokens to those that an engine computes for requests that it serves alone. It returns how many are
// before them, until when they take, and for how long.
func (e *engine) occupy(tokens float64, s Speed, now int64) (before float64, until, takes int64) {
	if s.PerPrompt <= 0 {
		return 0, 0, 0
	}
	takes = int64(tokens * s.PerPrompt * float64(time.Second))
	for {
		was := e.busyUntil.Load()
		from := max(was, now)
		if e.busyUntil.CompareAndSwap(was, from+takes) {
			return time.Duration(from-now).Seconds() / s.PerPrompt, from + takes, takes
		}
	}
}

// idle takes back the time that a request was to occupy that was served alone, and has ended before.
func (t *ticket) idle(now time.Time) {
	// the time before has passed
	t.engines[decodeRole].busyUntil.Add(-min(t.takes, max(0, t.until-t.s.books.clock(now))))
}

// endPrefill is told that the prefill leg has ended.
func (t *ticket) endPrefill(o *pdflow.LegOutcome) {
	if !t.prefills.CompareAndSwap(true, false) {
		return
	}
	defer t.report()
	t.endLeg(o)
	if t.innerPrefill != nil {
		t.innerPrefill(o)
	}
}

// Whether the decode engine of a ticket has its request.
const (
	coming = iota
	there
	gone
)

// has notes what an engine can speak of.
func (s *shared) has(e *engine, n int, now time.Time) {
	if s.o.Load != nil {
		e.here.Add(n, now)
	}
}

func (t *ticket) endLeg(o *pdflow.LegOutcome) {
	p := t.engines[prefillRole]
	d := t.engines[decodeRole]
	p.prefilling.Add(-t.own)
	p.prefills.Add(-1)
	d.coming.Add(-1)
	d.arriving.Add(-t.prompt)
	d.running.Add(1)
	d.context.Add(t.prompt)
	now := t.s.o.Now()
	t.s.has(p, -1, now)
	if t.here.CompareAndSwap(coming, there) {
		t.s.has(d, 1, now)
	}
	if o == nil || o.Err != nil { // it was given back, or there is no KV: nothing moves
		p.unsent.Add(-int64(t.seen.fetched))
		d.unsent.Add(-int64(t.seen.fetched))
		return
	}
	clock := t.s.books.clock(now)
	then := max(p.move(int64(t.seen.fetched), t.perToken, clock), d.move(int64(t.seen.fetched), t.perToken, clock))
	if t.perToken > 0 && t.s.o.Link > 0 && t.roomy {
		t.seen.saidTransfer = time.Duration(then-clock).Seconds() / t.s.books.ledger.scales.at(linkScale)
	}
	t.seen.prefillTook = o.Duration().Seconds()
}

// end is told that the attempt has ended. A prefill leg that runs on is reported later, and one that was never begun is
// not.
func (t *ticket) end(o *pdflow.Outcome) {
	defer t.report() // also when the inner picker panics
	d := t.engines[decodeRole]
	if t.seen.saidITL > 0 { // what runs there has changed since: the mean of both is what the speed says
		now := t.step.step(float64(d.running.Load()), float64(d.context.Load()), d.beside.at(t.s.o.Now()))
		t.seen.saidITL = (t.seen.saidITL + now) / 2 / t.scale
	}
	d.running.Add(-1)
	d.context.Add(-t.prompt)
	if t.here.Swap(gone) == there {
		t.s.has(d, -1, t.s.o.Now())
	}
	if !o.PrefillRuns && t.prefills.CompareAndSwap(true, false) {
		t.endLeg(nil)
		defer t.report()
	}
	if t.seen.alone {
		now := t.s.o.Now()
		// By a speed that was learnt, it may have been thought to take too long.
		if o.Err != nil || !t.s.books.hostTells {
			t.idle(now)
		}
		// An engine whose response has begun has prefilled, however that ends.
		if leg := &o.Decode; o.Err != nil && (leg.FirstByte.IsZero() || leg.Status >= http.StatusBadRequest) {
			d.beside.takeBack(float64(t.own), t.at, now)
		}
	}
	if t.decided && o.Mode != "" { // not a pick that is given back unused
		t.s.tel.count(t.action, t.reason)
	}
	if o.Err == nil && !o.PrefillRuns {
		t.seen.tell(o, t.at)
		t.s.books.learn(&t.seen, t.s.o.ErrorBound, t.s.o.Now())
	}
	t.endRecorded(o)
	if t.inner != nil {
		t.inner(o)
	}
}

// report gives the ticket back after the last report.
func (t *ticket) report() {
	if t.reports.Add(-1) == 0 {
		t.inner, t.innerPrefill, t.seen, t.engines = nil, nil, seen{}, [2]*engine{}
		t.s.tickets.Put(t)
	}
}
