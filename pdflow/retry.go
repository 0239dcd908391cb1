// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/verdict"
	"github.com/pdkit/pdkit/pdflow/internal/live"
)

// Why a failed attempt is retried, or is not: the values of Outcome.Retry and of the attribute pd.reason.
const (
	retryNotAccepted = "not_accepted" // retried: the engine that failed has not got the request
	retryFailed      = "failed"       // retried: an engine failed
	retryElsewhere   = "elsewhere"    // retried, whatever the limits: the engine that refused speaks for itself alone
	retryTimeout     = "timeout"      // retried if prefill or the transfer of its KV ran out of time, else not
	retryFinal       = "final"        // not: another pair would fail the same way
	retryOrphan      = "orphan"       // not: decode waits for this prefill, and prefill is not free before that ends
	retryGiven       = "given"        // not: the caller has chosen the engines
	retryBody        = "body"         // not: two engines have answered this body with an error
	retryAttempts    = "attempts"     // not: Retry.MaxAttempts
	retryFallback    = "fallback"     // not: a decode engine serves the request alone
	overBudget       = "budget"       // not: Retry.Budget
	retryNoPair      = "no_pair"      // not, although it may be: no other engines, or no other pair, are there
)

// mayRetry reports whether to retry after the attempt has failed with e, and why. If so, the request holds a part of
// the flow's budget until the next attempt has ended.
func (a *attempt) mayRetry(e *Error) (again bool, reason string) {
	x := a.x
	reason, again = a.retryReason(e)
	switch {
	case !again:
		return false, reason
	case x.given != nil:
		return false, retryGiven
	case reason == retryElsewhere:
		x.refusal, x.refusedBy, x.tooShort = e, append(x.refusedBy, e.Endpoint), max(x.tooShort, e.short)
		return true, reason
	case e.answered() && x.drew != "" && x.drew != e.Endpoint:
		x.f.retries.Drawn()
		return false, retryBody
	case a.s.Attempt-x.before-len(x.refusedBy) >= a.f.retry.MaxAttempts:
		return false, retryAttempts
	case e.Code == CodeTransferMissing && a.f.opts.fallback == config.FallbackDecode: // D can do without at once
		return false, retryFallback
	case !a.f.retries.Take(e.retryCause()):
		return false, overBudget
	}
	x.holdsRetry, x.retryCause = true, e.retryCause()
	if e.answered() && x.drew == "" {
		x.drew = e.Endpoint
	}
	if e.Code == CodeTimeout {
		x.timedOut, x.timedOutAt = e, [2]string{a.s.Prefill.ID, a.s.Decode.ID}
	}
	return true, reason
}

// answered reports whether an engine has answered with a fault that the request's body may have drawn. An engine that
// has no room, or whose own engine cannot be reached, says nothing of the body.
func (e *Error) answered() bool {
	switch e.Status {
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return false
	}
	return e.retryable() && e.retryCause() == live.Answered
}

func (e *Error) retryCause() live.Cause {
	if e.Status >= 500 || e.Code == CodeTransferMissing {
		return live.Answered
	}
	return live.Transport
}

// retryReason says what kind of failure e is, and whether that kind is retried. The reason is "" if the request ended
// for a cause outside of the engines: its client left, or the flow shuts down.
func (a *attempt) retryReason(e *Error) (reason string, ok bool) {
	switch {
	case e.Code == CodeTimeout && !e.caller:
		switch {
		case a.f.retry.TimeoutFinal:
		case e.Leg == LegDecode && e.Phase == "send" && !a.sent:
			return retryNotAccepted, true
		case e.Leg == LegPrefill && a.orphaned():
			return retryOrphan, false
		case e.Leg == LegPrefill, e.hung():
			return retryTimeout, true
		}
		return retryTimeout, false
	case e.caller, e.Code == CodeClientGone, e.Code == CodeDraining, e.Code == CodeForgotten:
		return "", false
	case a.speaksForItself(e):
		return retryElsewhere, true
	case !e.retryable():
		return retryFinal, false
	case e.Phase == "connect":
		return retryNotAccepted, true
	}
	return retryFailed, true
}

// maxElsewhere is how many engines that do not have a model, or have each a longer context than the one before, are
// asked one after the other. Which engines have a model is known where discovery/inspect lists it, and pickers remember
// those that have not.
const maxElsewhere = 8

// furtherASecond is how many requests of a flow may be sent to a third engine, and to further ones, in a second: who
// sends one new name after another must not have all engines asked for each.
const furtherASecond = 100

// further counts them.
type further struct {
	mu     sync.Mutex
	second int64
	n      int
}

func (f *further) take(now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if now.Unix() != f.second {
		f.second, f.n = now.Unix(), 0
	}
	f.n++
	return f.n <= furtherASecond
}

// speaksForItself reports whether an engine has refused a request that another one may take: see verdict.Refusals.
func (a *attempt) speaksForItself(e *Error) bool {
	if e.Leg == LegEncode { // another pick may name the same encode engines
		return false
	}
	switch n := len(a.x.refusedBy); {
	case e.scope == verdict.ScopeModel, e.scope == verdict.ScopeContext:
		return n == 0 || n < maxElsewhere && a.f.further.take(time.Now())
	case e.scope == verdict.ScopeEngine, e.doubted:
		return n == 0
	}
	return false
}

// compareContexts completes a refusal about the context's length. It speaks of the request alone where that length is
// not known: then nobody can say which engines have a longer one.
func (a *attempt) compareContexts(e *Error) {
	if e.scope != verdict.ScopeContext {
		return
	}
	if e.short = contextOf(&a.s.Decode); e.Leg == LegPrefill {
		d := e.short
		e.short = contextOf(&a.s.Prefill)
		e.all = d > 0 && d <= e.short
	}
	if e.short == 0 {
		e.scope = verdict.ScopeRequest
	}
}

// tooShortAgain reports whether a pick's engines have no longer context than one that was too short. P need have one
// only for the prompt: decode may have refused because of the limit of tokens.
func (x *serving) tooShortAgain(p *Pick) bool {
	short := func(e *discovery.Endpoint) bool { n := contextOf(e); return n > 0 && n <= x.tooShort }
	return x.tooShort > 0 && (short(&p.Decode) || x.refusal.Leg == LegPrefill && short(&p.Prefill))
}

// attrMaxModelLen is the attribute of an endpoint with the length of its context, in tokens: discovery/inspect adds it.
const attrMaxModelLen = "maxModelLen"

// contextOf returns that length; 0 if it is not known.
func contextOf(e *discovery.Endpoint) int {
	n, _ := attr.Int(*e, attrMaxModelLen, 0, 1, math.MaxInt) // nonsense says nothing
	return n
}

// giveRetryBack gives back what mayRetry took.
func (x *serving) giveRetryBack() {
	if x.holdsRetry {
		x.holdsRetry = false
		x.f.retries.Give(x.retryCause)
	}
}

// admit looks at a pick before anything is sent. It refuses the engine at which this request's prefill ran out of time,
// and the pair whose transfer did: that means that no other is there, and the engine has enough to do. It refuses those
// that have refused the request while others might have taken it. And it waits as long as an engine of the pick has
// asked for by Retry-After, but no longer than the longest pause.
func (x *serving) admit(p *Pick) *Error {
	last := x.timedOut
	switch {
	case last != nil && last.hung() && x.timedOutAt == [2]string{p.Prefill.ID, p.Decode.ID}:
	case last != nil && !last.hung() && last.Endpoint == p.Prefill.ID && p.Prefill.ID != "":
	case slices.Contains(x.refusedBy, p.Decode.ID), p.Prefill.ID != "" && slices.Contains(x.refusedBy, p.Prefill.ID),
		x.tooShortAgain(p):
		last = x.refusal
	default:
		last = nil
	}
	if last != nil {
		x.tel.NotRetried(retryNoPair, last.failure())
		x.decline(p)
		return last
	}
	if e := x.pause(time.Until(later(x.busyUntil[p.Prefill.ID], x.busyUntil[p.Decode.ID]))); e != nil {
		x.decline(p)
		return e
	}
	return nil
}

// decline gives a pick back to which nothing is sent.
func (x *serving) decline(p *Pick) {
	if p.Done == nil {
		return
	}
	p.Done(&Outcome{Session: contract.NewSession(x.request(), x.id, p.Prefill, p.Decode), Connector: x.f.name,
		Prefill: LegOutcome{Leg: LegPrefill}, Decode: LegOutcome{Leg: LegDecode}, Err: &Error{Code: CodeCanceled}})
}

// heed notes how long the engine that failed wants to be left alone.
func (x *serving) heed(e *Error) {
	if wait := min(e.wait, x.f.retry.BackoffMax); wait > 0 {
		if x.busyUntil == nil {
			x.busyUntil = map[string]time.Time{}
		}
		x.busyUntil[e.Endpoint] = time.Now().Add(wait)
	}
}

// backoff waits between attempts, for a random time up to a limit that doubles with each attempt: the clients of an
// engine that failed do not return together.
func (x *serving) backoff(n int) *Error {
	limit := min(x.f.retry.BackoffBase<<min(n-1, 20), x.f.retry.BackoffMax)
	if limit <= 0 {
		return nil
	}
	return x.pause(rand.N(limit + 1)) //nolint:gosec // jitter, guards nothing
}

func (x *serving) pause(d time.Duration) *Error {
	if d <= 0 {
		return nil
	}
	x.phase.Store(phaseBackoff)
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-x.life.Context.Done():
		return x.f.whyEnded(x.life.Context, "", "backoff")
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// retryAfter reads the header Retry-After of an engine's response: seconds, or a date. It is 0 if there is none.
func retryAfter(h http.Header) time.Duration {
	v := h.Get("Retry-After")
	if seconds, err := strconv.ParseUint(v, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(v); err == nil {
		return max(time.Until(at), 0)
	}
	return 0
}
