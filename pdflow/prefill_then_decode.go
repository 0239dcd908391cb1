// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/transport"
)

// prefillThenDecode is the serial order: P's response holds what D needs.
func (a *attempt) prefillThenDecode() (*Body, *Error) {
	p, e := a.prefill()
	if e != nil {
		return nil, e
	}
	if a.proceed != nil && !a.proceed() {
		return nil, a.f.whyEnded(a.ctx, LegPrefill, "response")
	}
	if body, ok, e := a.prefillsResponse(p); ok || e != nil {
		return body, e
	}
	if e := a.awaitEvent(); e != nil {
		return nil, e
	}
	return a.decodeAfter(p)
}

// decodeAfter describes and sends decode once P has answered, if the handoff is still young enough.
func (a *attempt) decodeAfter(p *connector.PrefillResult) (*Body, *Error) {
	if a.f.traits.Handoff.Lease > 0 {
		a.leaseUntil(p.At.Add(a.f.traits.Handoff.Lease))
	}
	leg, e := a.describeDecode(p)
	if e != nil {
		return nil, e
	}
	if e := a.stale(p); e != nil {
		return nil, e
	}
	if limit := a.f.limits.Handoff; limit > 0 {
		a.freshUntil = p.At.Add(limit)
	}
	if a.ctx.Err() != nil {
		// Once the client has left, no new leg is sent, not even to free P's blocks: they wait for the lease.
		return nil, a.f.whyEnded(a.ctx, LegDecode, "send")
	}
	body, e := a.decodeInTime(a.whileFresh(p), leg)
	if e != nil && e.Code == CodeDecodeRejected {
		a.release(leg)
	}
	return body, e
}

// stale refuses a handoff that decode could only use wrongly: after P's lease its blocks belong to another prompt, and
// D answers 200 with that prompt's text (docs/protocols/nixl.md, recording 60).
func (a *attempt) stale(p *connector.PrefillResult) *Error {
	age := time.Since(p.At)
	if a.f.handsOver() {
		a.out.HandoffAge = age
		a.x.tel.Handoff(age)
	}
	if limit := a.f.limits.Handoff; limit <= 0 || age <= limit {
		return nil
	}
	return a.expired()
}

// handsOver reports whether P's response says where its KV is. In a store the KV has no such age.
func (f *Flow) handsOver() bool {
	return f.traits.Handoff.Member != "" || f.traits.Handoff.Header != ""
}

// whileFresh asks again for the handoff's age when D's connection stands: making it may have taken long.
func (a *attempt) whileFresh(p *connector.PrefillResult) context.Context {
	if a.f.limits.Handoff <= 0 {
		return a.ctx
	}
	return transport.BeforeSend(a.ctx, func(bool) error {
		if time.Since(p.At) > a.f.limits.Handoff {
			return a.expired()
		}
		return nil
	})
}

func (a *attempt) expired() *Error {
	return &Error{Code: CodeHandoffExpired, Leg: LegDecode, Phase: "handoff", Connector: a.f.name,
		Endpoint: a.s.Prefill.ID, Message: "the KV handoff became too old before decode could be sent"}
}

// awaitEvent waits for what the protocol expects between the legs.
func (a *attempt) awaitEvent() *Error {
	if a.wait == nil {
		return nil
	}
	a.x.phase.Store(phaseEvent)
	var ev connector.Event
	a.watch.Limit(a.f.limits.Prefill) // the connector's own limit is shorter
	defer a.watch.Relax()
	if e := a.guard(LegPrefill, "event", func() (err error) { ev, err = a.wait(a.ctx); return err }); e != nil {
		if a.ctx.Err() != nil {
			return a.f.whyEnded(a.ctx, LegPrefill, "event")
		}
		if e.Code == CodeInternal {
			e.Code, e.Message = CodeTimeout, "the engines' notice did not come in time"
		}
		return e
	}
	a.s.Event = ev
	return nil
}

// prefillsResponse lets P's response be the client's, where the protocol says that P has finished.
func (a *attempt) prefillsResponse(p *connector.PrefillResult) (*Body, bool, *Error) {
	if a.f.finisher == nil {
		return nil, false, nil
	}
	var response connector.Response
	var ok bool
	if e := a.guard(LegPrefill, "response", func() error {
		response, ok = a.f.finisher.Final(a.s, p)
		return nil
	}); e != nil || !ok {
		return nil, false, e
	}
	return finalBody(a, a.askedModel(response)), true, nil
}
