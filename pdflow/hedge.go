// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow/internal/live"
)

// What came of a second prefill: the values of pd.reason of pd.hedges, beside overBudget and retryNoPair.
const (
	hedgeWon  = "won"  // it was first, or the first prefill failed
	hedgeLost = "lost" // the first prefill was first, or the second failed
)

// retryHedge is the Outcome.Retry of the attempt whose prefill was not needed.
const retryHedge = "hedge"

// hedgeLease is the longest lease with which a second prefill may run.
const hedgeLease = time.Minute

// hedges reports whether a second prefill may run beside a slow one. The order must be P and then D, so that no D waits
// for the P that is cancelled. And P must put its KV into a store, or offer it for a short lease: if both prefills
// finish, nobody frees what the slower one offers. A P that reads from an earlier D's blocks (FromDecode) would read
// them twice.
func (f *Flow) hedges() bool {
	t := &f.traits
	return f.retry.Hedge > 0 && f.order == connector.PrefillThenDecode &&
		(t.Handoff.ContentStore || t.Handoff.Lease > 0 && t.Handoff.Lease <= hedgeLease) && !t.Handoff.FromDecode &&
		f.expecter == nil && f.preparer == nil && f.encoder == nil
}

// race is two attempts of which the first whose prefill serves goes on to decode.
type race struct {
	winner  atomic.Pointer[attempt]
	decided chan struct{} // closed once there is a winner
}

// racer is an attempt that runs in a goroutine of its own.
type racer struct {
	a    *attempt
	body *Body
	e    *Error
	done chan struct{} // closed once body or e is known
}

// wins reports, once an attempt's prefill has served, whether the attempt goes on to decode.
func (r *race) wins(a *attempt) bool {
	if !r.winner.CompareAndSwap(nil, a) {
		return false
	}
	close(r.decided)
	return true
}

func (r *race) start(a *attempt) *racer {
	one := &racer{a: a, done: make(chan struct{})}
	a.proceed = func() bool { return r.wins(a) }
	a.ctx, a.cancel = context.WithCancelCause(a.ctx)
	a.bg.Go(func() {
		defer close(one.done)
		if e := a.guard(LegPrefill, "run", func() error { one.body, one.e = a.run(); return nil }); e != nil {
			one.e = e
		}
	})
	return one
}

// runAttempt runs an attempt. If its prefill has not ended within Retry.Hedge, it runs a second one at another prefill
// engine, within the budget of retries. It returns the attempt that decides the request's fate.
func (x *serving) runAttempt(a *attempt) (*attempt, *Body, *Error) {
	if !a.twoLegs() || x.given != nil || x.sender.steps != nil || !x.f.hedges() {
		body, e := a.run()
		return a, body, e
	}
	r := &race{decided: make(chan struct{})}
	first := r.start(a)
	timer := time.NewTimer(x.f.retry.Hedge)
	defer timer.Stop()
	select {
	case <-first.done:
	case <-r.decided:
	case <-timer.C:
		if !x.f.retries.Take(live.Hedge) {
			x.tel.Hedged(overBudget)
			break
		}
		defer x.f.retries.Give(live.Hedge)
		x.racing = a
		b := x.second(r, first)
		x.racing = nil
		if b != nil {
			return x.await(r, first, r.start(b))
		}
		x.tel.Hedged(retryNoPair)
	}
	<-first.done
	return a, first.body, first.e
}

// second returns an attempt at another prefill engine, nil if there is none before the first one's prefill has ended.
func (x *serving) second(r *race, first *racer) *attempt {
	ctx, stop := context.WithCancel(x.life.Context)
	defer stop()
	go func() { // a picker may wait for an engine
		defer stop()
		select {
		case <-first.done:
		case <-r.decided:
		case <-ctx.Done():
		}
	}()
	s, avoid := first.a.s, x.avoid
	x.avoid = append(slices.Clip(avoid), s.Prefill.ID)
	var pick Pick
	e := x.pick(ctx, s.Attempt, &pick)
	x.avoid = avoid
	if e != nil {
		return nil
	}
	if pick.Prefill.URL == nil || pick.Prefill.ID == s.Prefill.ID || ctx.Err() != nil {
		x.decline(&pick)
		return nil
	}
	return newAttempt(x, s.Attempt, first.a.out.Mode, &pick)
}

// await waits until one of two attempts has prefilled or failed, cancels the loser, and waits for the other.
func (x *serving) await(r *race, first, second *racer) (*attempt, *Body, *Error) {
	select {
	case <-first.done:
	case <-second.done:
	case <-r.decided:
	}
	fate, loser, result := first, second, hedgeLost
	if won := r.winner.Load(); won == second.a || won == nil && first.ended() {
		fate, loser, result = second, first, hedgeWon
	}
	x.tel.Hedged(result)
	x.current.Store(fate.a)
	if loser.ended() && loser.e != nil && loser.e.EngineFault() {
		x.avoid = append(x.avoid, loser.a.failed(loser.e)...)
	}
	loser.a.cancel(errOver)
	fate.a.bg.Go(func() { // the response need not wait for this
		<-loser.done
		x.lost(loser.a, loser.e)
	})
	<-fate.done
	return fate.a, fate.body, fate.e
}

func (o *racer) ended() bool {
	select {
	case <-o.done:
		return true
	default:
		return false
	}
}

// lost ends the attempt that does not decide the request's fate.
func (x *serving) lost(a *attempt, e *Error) {
	a.out.Final, a.out.Retry = false, retryHedge
	if e == nil || !e.EngineFault() {
		e = &Error{Code: CodeCanceled, Leg: LegPrefill, Phase: "response", Connector: x.f.name,
			Message: "another prefill engine was faster"}
	}
	a.end(e)
}
