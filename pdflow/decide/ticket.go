// SPDX-License-Identifier: Apache-2.0

package decide

import (
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
	prompt       int64 // tokens
	own          int64 // of them, those that prefill computes
	seen         seen
	decided      bool // by the policy
	action       Action
	reason       string
	prefills     atomic.Bool  // the prefill leg counts
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
	now := x.now
	d := s.books.engine(out.Decode.ID, now)
	t.at, t.prompt, t.decided = now, int64(x.in.Prompt), decided
	t.action, t.reason = x.decision.Action, x.decision.Reason
	t.engines, t.seen = [2]*engine{decodeRole: d}, seen{decode: d, alone: out.Prefill.URL == nil}
	if decided {
		t.seen.ttft, t.seen.itl = x.decision.TTFT.Seconds(), x.decision.ITL.Seconds()
	}
	t.inner, t.innerPrefill = out.Done, out.PrefillDone
	t.reports.Store(1)
	cached := x.cached(out)
	t.seen.fetched = float64(t.prompt) - cached[decodeRole]
	t.seen.crowd = float64(d.running.Add(1))
	d.context.Add(t.prompt)
	d.used.Store(now.UnixNano())
	if t.seen.alone {
		t.own = max(t.prompt-int64(cached[decodeRole]), 1)
		t.seen.work = float64(t.own) + d.occupy(float64(t.own), d.known(&s.books), now)
	} else {
		p := s.books.engine(out.Prefill.ID, now)
		t.own = max(t.prompt-int64(cached[prefillRole]), 1)
		t.engines[prefillRole], t.seen.prefill = p, p
		t.seen.work = float64(p.prefilling.Add(t.own))
		p.prefills.Add(1)
		p.used.Store(now.UnixNano())
		t.prefills.Store(true)
		t.reports.Store(2)
		out.PrefillDone = t.prefillDone
	}
	out.Done = t.done
	return *out
}

// cached is how many tokens of the prompt the engines of a pick are taken to have.
func (x *scratch) cached(out *pdflow.Pick) (tokens [2]float64) {
	for role, id := range [2]string{out.Prefill.ID, out.Decode.ID} {
		if c := x.candidate(role, id); c != nil {
			tokens[role] = c.has(x.in.Prompt)
		}
	}
	return tokens
}

// occupy adds prompt tokens to those that an engine computes for requests that it serves alone, and returns how many
// are before them.
func (e *engine) occupy(tokens float64, s Speed, now time.Time) float64 {
	if s.PerPrompt <= 0 {
		return 0
	}
	for {
		until := e.busyUntil.Load()
		from := max(until, now.UnixNano())
		if e.busyUntil.CompareAndSwap(until, from+int64(tokens*s.PerPrompt*float64(time.Second))) {
			return time.Duration(from-now.UnixNano()).Seconds() / s.PerPrompt
		}
	}
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

func (t *ticket) endLeg(o *pdflow.LegOutcome) {
	p := t.engines[prefillRole]
	p.prefilling.Add(-t.own)
	p.prefills.Add(-1)
	if o != nil && o.Err == nil {
		t.seen.prefillTook = o.Duration().Seconds()
	}
}

// end is told that the attempt has ended. A prefill leg that runs on is reported later, and one that was never begun is
// not.
func (t *ticket) end(o *pdflow.Outcome) {
	defer t.report() // also when the inner picker panics
	d := t.engines[decodeRole]
	d.running.Add(-1)
	d.context.Add(-t.prompt)
	if !o.PrefillRuns && t.prefills.CompareAndSwap(true, false) {
		t.endLeg(nil)
		defer t.report()
	}
	if t.decided && o.Session != nil {
		t.s.tel.count(t.action, t.reason)
	}
	if o.Err == nil && !o.PrefillRuns {
		t.seen.tell(o, t.at)
		t.s.books.learn(&t.seen, t.s.o.ErrorBound)
	}
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
