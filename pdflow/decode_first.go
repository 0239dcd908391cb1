// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
)

// decodeFirst asks D first. If its response says that it has too little of the prompt, P runs, and then D again.
func (a *attempt) decodeFirst() (*Body, *Error) {
	leg, e := a.describeDecode(nil)
	if e != nil {
		return nil, e
	}
	body, e := a.decodeInTime(a.ctx, leg)
	if e != nil {
		return nil, e
	}
	cold := false
	if e := a.guard(LegDecode, "response", func() error {
		cold = a.f.cold.Cold(a.s, body.status, body.s.Significant())
		return nil
	}); e != nil {
		body.discard(e)
		return nil, e
	}
	if !cold {
		return body, nil
	}
	body.discard(nil)
	a.out.Decode = LegOutcome{Leg: LegDecode}
	return a.prefillThenDecode()
}

// decodeThenPrefill sends D, which waits; its event starts P. If D answers without asking, it had the prompt.
func (a *attempt) decodeThenPrefill() (*Body, *Error) {
	leg, e := a.describeDecode(nil)
	if e != nil {
		return nil, e
	}
	if a.correctsUsage() || a.mergesMembers(a.s.Request.Stream) {
		a.pEnded = make(chan struct{})
	}
	a.watch.Limit(a.f.limits.Decode)
	decoded := a.goDecode(leg)
	if a.wait == nil {
		return a.join(nil, decoded)
	}
	waited := make(chan *Error, 1)
	waiting, stop := context.WithCancelCause(a.ctx)
	defer stop(errOver)
	a.bg.Go(func() {
		waited <- a.guard(LegDecode, "event", func() error {
			ev, err := a.wait(waiting)
			if err == nil {
				a.s.Event = ev
			}
			return err
		})
	})
	select {
	case end := <-decoded: // without asking, or failed
		a.watch.Relax()
		return end.body, end.e
	case e := <-waited:
		if e == nil {
			return a.join(a.goPrefill(), decoded)
		}
		ended := waiting.Err() != nil
		if ended {
			e = a.f.whyEnded(waiting, LegDecode, "event")
		} else if e.Code == CodeInternal {
			e.Code, e.Message = CodeTimeout, "decode did not ask for a prefill in time"
		}
		a.cancel(e.clone())
		d := <-decoded
		if d.body != nil {
			d.body.discard(e)
		} else if ended { // the leg knows how far it got, on which a retry depends
			e = d.e
		}
		return nil, e
	}
}
