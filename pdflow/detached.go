// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/pdkit/pdkit/pdflow/internal/legs"
	"github.com/pdkit/pdkit/pdflow/internal/live"
	"github.com/pdkit/pdkit/transport"
)

// maxRunningOn is how many prefill legs of requests that are over a flow lets run on at one engine. More would be free
// prefill for clients that leave. They are not cancelled: the engine gets no new pair until one has ended.
const maxRunningOn = 32

// ranOnLimit is how long a leg may run on where neither Timeouts.Prefill nor a lease says it.
const ranOnLimit = 10 * time.Minute

// detachedLeg is a prefill leg that may run on after its attempt (connector.Ending.PrefillFinishes). It has a context
// of its own. Until it is sent it ends with the attempt; from then on only its own time and a shutdown end it.
type detachedLeg struct {
	a      *attempt
	ctx    context.Context
	cancel context.CancelCauseFunc
	out    LegOutcome
	done   chan struct{} // closed when the leg has ended

	mu      sync.Mutex
	sent    bool // P has got the leg, or may have
	read    bool // its response is read, or its error known
	runsOn  bool // the attempt is over, and the leg is not
	timer   *time.Timer
	started time.Time
	unblock func(context.Context) bool // see attempt.unblocking; set when the attempt is over
}

func newDetachedLeg(a *attempt) *detachedLeg {
	l := &detachedLeg{a: a, out: LegOutcome{Leg: LegPrefill}, done: make(chan struct{}), started: time.Now()}
	l.ctx, l.cancel = context.WithCancelCause(context.WithoutCancel(a.ctx))
	context.AfterFunc(a.ctx, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if cause := context.Cause(a.ctx); !l.sent || errors.Is(cause, errCut) {
			l.cancel(cause)
		}
	})
	return l
}

// noteSending notes whether the leg goes out now or waits. The error says that the attempt is over. l may be nil.
func (l *detachedLeg) noteSending(now bool) error {
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent = now && l.a.ctx.Err() == nil
	return context.Cause(l.a.ctx)
}

// watchResend lets the transport try the leg again, where provably no byte of it was sent. Until the further try is
// sent, the leg ends with the attempt, as before the first one. l may be nil.
func (l *detachedLeg) watchResend(req *http.Request) {
	if l == nil || req.GetBody == nil {
		return
	}
	body := req.GetBody
	req.GetBody = func() (io.ReadCloser, error) { // called before the wait for a further try
		if err := l.noteSending(false); err != nil {
			return nil, err
		}
		return body()
	}
}

// holdPrefill returns the context of P's leg, which goes out when D's does, and not after the attempt.
func (a *attempt) holdPrefill(ctx context.Context) context.Context {
	if a.detached == nil && a.rendezvous == nil {
		return ctx
	}
	return transport.BeforeSend(ctx, func(connected bool) error {
		// a round tripper that has read the body, and so looked as if it had sent the leg, may yet have to connect
		if err := a.detached.noteSending(false); err != nil {
			return err
		}
		if err := a.rendezvous.Wait(ctx, legs.Prefill, connected); err != nil {
			return err
		}
		return a.detached.noteSending(true)
	})
}

// prefillsWord waits for P's leg, which decode is waiting for, or which says better than decode's error e what failed.
// A leg that may run on is not waited for when the attempt is over; but P's failure often shows on D a moment earlier.
func (a *attempt) prefillsWord(prefilled <-chan prefillEnd, e *Error) prefillEnd {
	if a.detached == nil {
		return <-prefilled
	}
	if e != nil && (e.Code == CodeDecodeFailed || e.Code == CodeDecodeRejected) {
		timer := time.NewTimer(prefillGrace)
		defer timer.Stop()
		select {
		case p := <-prefilled:
			return p
		case <-timer.C:
			return prefillEnd{}
		}
	}
	select {
	case p := <-prefilled:
		return p
	case <-a.ctx.Done():
	}
	late := a.f.whyEnded(a.ctx, LegPrefill, "response")
	if late.Code == CodeTimeout {
		late.Endpoint = a.s.Prefill.ID
		return prefillEnd{e: late}
	}
	if e == nil {
		return prefillEnd{e: late}
	}
	return prefillEnd{}
}

// noteEnd notes that the leg's end is known, and reports whether its attempt is over. Then the leg must not touch the
// attempt's outcome any more. l may be nil.
func (l *detachedLeg) noteEnd() bool {
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.read = true
	return l.runsOn
}

// leavePrefill waits for P's leg, or lets it run on if it was sent. Should P then refuse it, too, unblock ends what P
// waits for, unless it is nil.
func (a *attempt) leavePrefill(unblock func(context.Context) bool) {
	l := a.detached
	if l == nil {
		return
	}
	l.mu.Lock()
	if a.x.sender.steps == nil { // a host that sends the legs asks for nothing any more
		l.unblock = unblock
	}
	if l.runsOn = l.sent && !l.read && l.ctx.Err() == nil; !l.runsOn {
		l.mu.Unlock()
		<-l.done
		a.out.Prefill = l.out
		return
	}
	defer l.mu.Unlock()
	a.out.Prefill.Endpoint, a.out.PrefillRuns = a.s.Prefill.ID, true
	a.held.keep() // l.ended gives both back
	a.x.held.keep()
	a.f.runningOn.Enter(l)
	limit := a.f.limits.Prefill
	if limit <= 0 { // nobody waits for the leg any more, so it has a limit
		limit = cmp.Or(a.f.traits.Handoff.Lease, ranOnLimit)
	}
	left := limit - time.Since(l.started)
	if left <= 0 || errors.Is(context.Cause(a.ctx), errPhaseTimeout) {
		// The limit, which began a moment earlier, has ended the attempt: P is slow, and cancelling it would free
		// nothing.
		left = limit
	}
	l.timer = time.AfterFunc(left, func() { l.cancel(errPhaseTimeout) })
}

// ended is the end of the leg's goroutine.
func (l *detachedLeg) ended() {
	l.mu.Lock()
	l.read = true
	if l.timer != nil {
		l.timer.Stop()
	}
	runsOn, unblock := l.runsOn, l.unblock
	l.mu.Unlock()
	// The leg's context, since a shutdown that cuts legs cuts this, too.
	unblocked := runsOn && unblock != nil && l.out.Status/100 == 4 && l.ctx.Err() == nil && unblock(l.ctx)
	l.cancel(errOver)
	close(l.done)
	if !runsOn {
		return
	}
	f, e := l.a.f, l.out.Err
	l.a.x.tel.RanOn(codeLabel(e))
	if unblocked {
		e = nil // D refused first, and nothing waits for this prefill any more
	}
	if e != nil && f.traits.Ending.Orphans && l.a.sent {
		l.a.x.tel.Orphaned()
	}
	l.a.held.giveBack()
	l.a.x.held.giveBack()
	f.runningOn.Leave(l)
}

// Stop cancels the leg.
func (l *detachedLeg) Stop(cause error) { l.cancel(cause) }

// runningOn are a flow's prefill legs that run on.
type runningOn struct {
	live.Set[*detachedLeg]
	most int // at one engine
}

// full returns the engines at which as many legs run on as may.
func (r *runningOn) full() (ids []string) {
	if r.Count() < r.most {
		return nil
	}
	at := map[string]int{}
	r.Each(func(l *detachedLeg) {
		id := l.a.s.Prefill.ID
		if at[id]++; at[id] == r.most {
			ids = append(ids, id)
		}
	})
	return ids
}

// overloaded refuses a pair whose prefill engine has to finish too many legs of requests that are over.
func (a *attempt) overloaded() *Error {
	if !a.f.traits.Ending.PrefillFinishes || !slices.Contains(a.f.runningOn.full(), a.s.Prefill.ID) {
		return nil
	}
	return &Error{Code: CodeOverloaded, Leg: LegPrefill, Phase: "pick", Connector: a.f.name, Endpoint: a.s.Prefill.ID,
		Message: "the prefill engines still compute prompts of clients that have left", RetryAfter: time.Second}
}
