// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/pdflow/internal/legs"
	"github.com/pdkit/pdkit/pdflow/internal/live"
	"github.com/pdkit/pdkit/pdflow/internal/telemetry"
)

// attempt is one session: one try of a request at one pair.
type attempt struct {
	x   *serving
	f   *Flow
	s   *connector.Session
	out Outcome
	running
	picked
	prefilled
	expected
	concurrent
	atEngines
	proceed func() bool // whether the attempt goes on to decode once its prefill has served; nil: it does
	ended   bool        // finish was called
	again   bool        // it is to be retried
}

// running is what an attempt holds as long as it runs.
type running struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	watch  live.Watchdog // limits the phase that runs
	silent live.Silence
	// the phase that runs, D's until its first event, has Timeouts.Transfer as its limit
	transfers atomic.Bool
	held      *holding // bytes of the responses of P and of encode engines
	legs      struct{ prefill, decode telemetry.Leg }
	bg        sync.WaitGroup // legs that run beside the one the caller waits for
}

// picked tells the picker. Both may be nil.
type picked struct {
	pickDone    func(*Outcome)
	prefillDone func(*LegOutcome)
}

// prefilled is what P's response has said.
type prefilled struct {
	p          atomic.Pointer[connector.PrefillResult]
	tookOver   tookOver
	freshUntil time.Time    // when the handoff is too old for decode; zero: it does not age
	expires    atomic.Int64 // end of the lease, Unix nanoseconds, for operators
}

// expected is what a connector.Expecter waits for.
type expected struct {
	wait func(context.Context) (connector.Event, error)
	done func(error)
}

// concurrent is what two legs that run beside each other share.
type concurrent struct {
	parallel   atomic.Bool      // P runs beside D, or has
	detached   *detachedLeg     // P's leg, where it may run on after the attempt; nil otherwise
	rendezvous *legs.Rendezvous // of two legs that are sent together; nil otherwise
	pEnded     chan struct{}    // closed when P's leg has ended; nil if nobody waits for that
	pGiven     chan struct{}    // where a host sends the legs: closed when it has P's
}

// atEngines is what is left at engines of a request that failed.
type atEngines struct {
	sent      bool // D has got the request, or may have; known when its leg has ended
	unblocked bool // both engines have refused the request, and P waits for nothing any more
	unread    bool // D has refused the request, and P keeps what it has for it
}

// twoLegs reports whether P takes part.
func (a *attempt) twoLegs() bool { return a.s.Prefill.URL != nil }

func newAttempt(x *serving, n int, mode Mode, pick *Pick) *attempt {
	s := contract.NewSession(x.request(), x.id, pick.Prefill, pick.Decode)
	s.Attempt, s.Encode, s.Header = n, pick.Encode, x.header
	contract.SetRanks(s, pick.PrefillRank, pick.DecodeRank)
	a := &attempt{x: x, f: x.f, s: s, picked: picked{pick.Done, pick.PrefillDone},
		out: Outcome{Session: s, Connector: x.f.name, Mode: mode, Reason: pick.Reason, Final: true,
			Prefill: LegOutcome{Leg: LegPrefill}, Decode: LegOutcome{Leg: LegDecode}}}
	a.ctx, a.cancel, a.held = x.life.Context, x.life.Cancel, x.f.opts.budget.hold()
	a.watch.Init(a, s.CreatedAt)
	if lease := x.f.traits.Handoff.Lease; lease > 0 && a.twoLegs() {
		a.leaseUntil(s.CreatedAt.Add(lease))
	}
	x.current.Store(a)
	for _, o := range x.f.opts.observers {
		if o.SessionStart != nil {
			o.SessionStart(a.ctx, s)
		}
	}
	return a
}

func (a *attempt) leaseUntil(t time.Time) {
	a.s.ExpiresAt = t
	a.expires.Store(t.UnixNano())
}

// run runs the legs in the connector's order and returns once decode's first event is known.
func (a *attempt) run() (*Body, *Error) {
	if !a.twoLegs() {
		return a.aggregated()
	}
	if e := a.overloaded(); e != nil {
		return nil, e
	}
	if e := a.prepare(); e != nil {
		return nil, e
	}
	if e := a.encode(); e != nil {
		return nil, e
	}
	if a.f.expecter != nil {
		if e := a.guard(LegPrefill, "expect", func() error {
			a.wait, a.done = a.f.expecter.Expect(a.s)
			return nil
		}); e != nil {
			return nil, e
		}
	}
	switch a.f.order {
	case connector.Together:
		return a.together()
	case connector.DecodeFirst:
		return a.decodeFirst()
	case connector.DecodeThenPrefill:
		return a.decodeThenPrefill()
	default:
		return a.prefillThenDecode()
	}
}

// aggregated sends the client's request, without transfer members, to one engine.
func (a *attempt) aggregated() (*Body, *Error) {
	return a.decodeInTime(a.ctx, contract.NewLeg(a.s.Request))
}

func (a *attempt) prepare() *Error {
	if a.f.preparer == nil {
		return nil
	}
	a.x.phase.Store(phasePrepare)
	a.watch.Limit(a.f.limits.Prefill)
	defer a.watch.Relax()
	ctx, done := a.span(a.ctx, "prepare", &a.s.Prefill, "")
	e := a.prepareBy(ctx)
	done(e)
	return e
}

func (a *attempt) prepareBy(ctx context.Context) *Error {
	var v any
	if e := a.guard(LegPrefill, "prepare", func() (err error) {
		v, err = a.f.preparer.Prepare(ctx, a.s, a.caller(ctx))
		return err
	}); e != nil {
		if a.ctx.Err() != nil {
			return a.f.whyEnded(a.ctx, LegPrefill, "prepare")
		}
		if e.Code == CodeInternal {
			e.Code, e.Message, e.Endpoint = CodePrefillFailed,
				"the prefill engine could not be asked for its transfer parameters", a.s.Prefill.ID
		}
		return e
	}
	a.s.Prepared = v
	return nil
}

// guard calls a connector's code: its errors and panics become this request's error, and nobody else's.
func (a *attempt) guard(leg LegKind, phase string, call func() error) (e *Error) {
	defer func() {
		if r := recover(); r != nil {
			e = &Error{Code: CodeInternal, Leg: leg, Phase: phase, Connector: a.f.name, Message: "the connector failed",
				Err: fmt.Errorf("panic: %v", r)}
		}
	}()
	err := call()
	if err == nil {
		return nil
	}
	e = &Error{Code: CodeInternal, Leg: leg, Phase: phase, Connector: a.f.name, Message: "the connector failed",
		Err: err}
	if own := new(Error); errors.As(err, &own) {
		return own
	}
	var bad *connector.RequestError
	var entry *attr.Error
	var unsupported *connector.UnsupportedError
	switch {
	case errors.As(err, &unsupported):
		e.Code, e.Leg, e.Param, e.Message = CodeUnsupported, "", unsupported.Member, unsupportedMessage
	case errors.As(err, &entry):
		e.Code, e.Leg, e.Endpoint, e.Message = CodePrefillFailed, LegPrefill, entry.Endpoint,
			"an engine's entry lacks what the protocol needs"
		if entry.Endpoint == a.s.Decode.ID {
			e.Code, e.Leg = CodeDecodeFailed, LegDecode
		}
	case errors.Is(err, connector.ErrNoTransfer) && leg == LegEncode:
		e.Code, e.Message = CodeEncodeFailed, "an encode engine gave no usable response"
	case errors.Is(err, connector.ErrNoTransfer):
		e.Code, e.Leg, e.Phase, e.Message = CodeTransferMissing, LegPrefill, "handoff",
			"the prefill engine gave no usable KV handoff"
		e.Endpoint = a.s.Prefill.ID
	case errors.As(err, &bad):
		e.Code, e.Param, e.Message = CodeInvalid, bad.Param, bad.Message
	}
	return e
}

// caller reaches the engines of this session, for side calls.
func (a *attempt) caller(ctx context.Context) connector.Caller {
	return func(r *http.Request) (*http.Response, error) {
		if !a.reaches(r.URL.Hostname()) {
			return nil, errors.New("pdflow: a side call may reach only the engines of its session")
		}
		if a.asksEngine(r.URL) {
			a.x.fillAbsent(r)
		}
		return a.x.sender.send(ctx, a, nil, r)
	}
}

// Expire ends the attempt because a phase ran out of time, unless it is the silence of an engine that is well, or of a
// pair.
func (a *attempt) Expire() {
	if !a.mayBeSilent() && !a.mayGenerate() {
		a.cancel(errPhaseTimeout)
	}
}

// clean lets the connector free what a failed attempt left behind.
func (a *attempt) clean(e *Error) {
	ctx, stop := a.f.briefly(context.WithoutCancel(a.x.life.Base))
	defer stop()
	ctx, done := a.span(ctx, "cleanup", nil, "")
	done(a.guard("", "cleanup", func() error { return a.f.cleaner.Clean(ctx, a.s, e, a.caller(ctx)) }))
}

// briefly returns a context for calls that clean up.
func (f *Flow) briefly(ctx context.Context) (context.Context, context.CancelFunc) {
	if f.limits.Cleanup <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, f.limits.Cleanup)
}

// end ends the attempt and tells everybody.
func (a *attempt) end(e *Error) {
	a.finish(e)
	a.tell(a.out.Final)
}

// finish is called exactly once per attempt, when nothing of it is wanted any more: it cancels what still runs, waits
// for it, and tells the picker.
func (a *attempt) finish(e *Error) {
	a.ended = true
	cause := errOver
	if e != nil {
		cause = e.clone()
	} else {
		a.awaitPrefillEnd()
	}
	a.watch.Stop()
	a.cancel(cause)
	a.watch.Wait()
	a.bg.Wait()
	unblock := a.unblocking()
	a.leavePrefill(unblock)
	if unblock != nil && !a.out.PrefillRuns && a.out.Prefill.Status/100 == 4 {
		a.unblocked = unblock(a.x.life.Base) // the attempt's own context is over
	}
	defer a.held.giveBack()
	if a.done != nil {
		_ = a.guard(LegDecode, "event", func() error { a.done(asError(e)); return nil })
	}
	a.out.Err = e
	a.out.Usage.Input = cmp.Or(a.out.Usage.Input, a.out.KVTokens) // here, since both legs' counts may come at once
	if a.out.Orphan = e != nil && a.orphaned(); a.out.Orphan {
		a.x.tel.Orphaned()
	}
	if e != nil && a.f.cleaner != nil && a.twoLegs() {
		a.clean(e)
	}
	a.recordEnd()
	_ = a.guard("", "done", func() error {
		if a.pickDone != nil {
			a.pickDone(&a.out)
		}
		return nil
	})
}

// tell tells the observers how the attempt ended. final says whether it was the last one after all: the picker has the
// outcome as it was.
func (a *attempt) tell(final bool) {
	out := &a.out
	if final != out.Final {
		last := a.out
		last.Final = final
		switch {
		case !a.again:
		case a.x.life.Context.Err() != nil:
			last.Retry = ""
		default:
			last.Retry = retryNoPair
		}
		out = &last
	}
	_ = a.guard("", "observe", func() error {
		for _, o := range a.f.opts.observers {
			if o.SessionEnd != nil {
				o.SessionEnd(a.x.client, out)
			}
		}
		return nil
	})
}

// orphaned reports whether a failed attempt leaves a D behind that waits for a prefill. One that has answered, if only
// with an error of its own, waits for nobody: a client's bad request, which both engines refuse, must not put
// their pair on cooldown. But with Ending.RefusalHolds P waits for that prefill all the same, unless it was given
// another one.
func (a *attempt) orphaned() bool {
	d := &a.out.Decode
	if a.out.PrefillRuns || a.unblocked ||
		d.Err != nil && d.Err.Leg == LegDecode && d.Err.Status != 0 && !a.refusalHolds(d.Err) {
		return false
	}
	return a.f.traits.Ending.Orphans && a.twoLegs() && a.sent && a.p.Load() == nil && d.FirstByte.IsZero()
}

// prefillGrace is how long a prefill may still run once the response is through.
const prefillGrace = 100 * time.Millisecond

// awaitPrefillEnd gives a prefill that still runs a moment to end by itself: D had its KV, so its response is about to
// come, and the connection can be kept. The client has its response, and waits for no more than its end.
func (a *attempt) awaitPrefillEnd() {
	if !a.parallel.Load() {
		return
	}
	ended := make(chan struct{})
	if a.detached != nil {
		ended = a.detached.done
	} else {
		go func() { a.bg.Wait(); close(ended) }() // ends with the cancel that follows
	}
	timer := time.NewTimer(prefillGrace)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
	}
}

// asError keeps a nil *Error from becoming an error that is not nil.
func asError(e *Error) error {
	if e == nil {
		return nil
	}
	return e
}

// failed returns the endpoints that a next attempt should avoid.
func (a *attempt) failed(e *Error) []string {
	switch e.Leg {
	case LegPrefill:
		return []string{a.s.Prefill.ID}
	case LegDecode:
		// A failed KV load shows on D, but its cause may be either engine: a P that was killed after it answered looks
		// like this (docs/protocols/nixl.md, recording 52).
		if a.p.Load() != nil && e.Status >= 500 && e.Code == CodeDecodeFailed || e.hung() {
			return []string{a.s.Decode.ID, a.s.Prefill.ID}
		}
		return []string{a.s.Decode.ID}
	}
	return nil
}
