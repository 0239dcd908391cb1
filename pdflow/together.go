// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow/internal/legs"
)

// prefillEnd and decodeEnd are how a leg that runs beside another reports.
type prefillEnd struct {
	p *connector.PrefillResult
	e *Error
}

type decodeEnd struct {
	body *Body
	e    *Error
}

// together sends both legs at once. Decode's head is held until prefill succeeded or decode's first event came. A
// failed prefill cancels decode at once: nobody else tells D, which would wait for minutes (docs/protocols/mooncake.md
// §4).
func (a *attempt) together() (*Body, *Error) {
	decodeLeg, e := a.describeDecode(nil)
	if e != nil {
		return nil, e
	}
	a.rendezvous = legs.NewRendezvous()
	if a.x.sender.steps != nil {
		a.pGiven = make(chan struct{})
	}
	if a.f.rewriter != nil || a.correctsUsage() || a.mergesMembers(a.s.Request.Stream) {
		a.pEnded = make(chan struct{})
	}
	prefilled := a.goPrefill()
	return a.join(prefilled, a.goDecode(decodeLeg))
}

// goPrefill runs the prefill leg beside the caller.
func (a *attempt) goPrefill() <-chan prefillEnd {
	ch := make(chan prefillEnd, 1)
	a.parallel.Store(true)
	a.watch.Limit(a.f.limits.Prefill)
	run := func() {
		var end prefillEnd
		if e := a.guard(LegPrefill, "send", func() error { end.p, end.e = a.prefill(); return nil }); e != nil {
			end.e = e
		}
		if a.pEnded != nil {
			close(a.pEnded)
		}
		ch <- end
	}
	if !a.f.traits.Ending.PrefillFinishes {
		a.bg.Go(run)
		return ch
	}
	a.detached = newDetachedLeg(a)
	go func() {
		defer a.detached.ended()
		run()
	}()
	return ch
}

// goDecode runs the decode leg, until its first event, beside the caller.
func (a *attempt) goDecode(leg *connector.Leg) <-chan decodeEnd {
	ch := make(chan decodeEnd, 1)
	a.bg.Go(func() {
		var end decodeEnd
		if e := a.guard(LegDecode, "send", func() error {
			end.body, end.e = a.decode(a.ctx, leg)
			return nil
		}); e != nil {
			end.e = e
		}
		ch <- end
	})
	return ch
}

// join waits for both legs that are in flight. The response goes out with decode's first event; prefill may still be
// ending then, and the attempt's end waits for it.
func (a *attempt) join(prefilled <-chan prefillEnd, decoded <-chan decodeEnd) (*Body, *Error) {
	for {
		select {
		case end := <-prefilled:
			prefilled = nil
			if end.e != nil {
				d, told := a.decodesRefusal(decoded, end.e)
				a.cancel(end.e.clone())
				if !told {
					d = <-decoded
				}
				if d.body != nil {
					d.body.discard(end.e)
				}
				return nil, end.e
			}
			a.watch.Limit(a.decodeLimit())
		case end := <-decoded:
			if end.e == nil && end.body.s == nil && prefilled != nil {
				// The host has seen D's status and no token. Without P's KV, D would send none and wait.
				if p := a.prefillsWord(prefilled, nil); p.e != nil {
					a.cancel(p.e.clone())
					end.body.discard(p.e)
					return nil, p.e
				}
			}
			a.watch.Relax()
			if end.e != nil {
				a.cancel(end.e.clone())
				// What failed first is often P, and D only shows it; P's own word is the better one.
				if prefilled != nil {
					if p := a.prefillsWord(prefilled, end.e); p.e != nil && p.e != end.e && p.e.Code != CodeClientGone {
						return nil, p.e
					}
				}
			}
			return end.body, end.e
		}
	}
}
