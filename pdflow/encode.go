// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
)

// maxEncodes is how many items of one request are encoded at once.
const maxEncodes = 8

// encode runs the encode stage: one leg per distinct item, at the engines that the picker named, in turn. One failed
// item fails the request.
func (a *attempt) encode() *Error {
	if a.f.encoder == nil {
		return nil
	}
	var items []connector.Item
	if e := a.guard(LegEncode, "describe", func() error { items = a.f.encoder.Items(a.s); return nil }); e != nil ||
		len(items) == 0 {
		return e
	}
	if len(a.s.Encode) == 0 {
		return &Error{Code: CodeNoEndpoint, Leg: LegEncode, Phase: "pick", Connector: a.f.name,
			Message: "no encode engine is ready", RetryAfter: time.Second}
	}
	a.x.phase.Store(phaseEncode)
	defer a.watch.Relax()
	ctx, cancel := context.WithCancelCause(a.ctx)
	defer cancel(errOver)
	distinct := map[string]int{}
	var work []connector.Item
	for _, i := range items {
		if _, seen := distinct[i.ID]; !seen {
			distinct[i.ID] = len(work)
			work = append(work, i)
		}
	}
	responses := make([]json.RawMessage, len(work))
	faults := make([]*Error, len(work))
	slots := make(chan struct{}, maxEncodes)
	var wg sync.WaitGroup
	for n, item := range work {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if e := a.guard(LegEncode, "send", func() error {
				responses[n], faults[n] = a.encodeItem(ctx, n, item)
				return nil
			}); e != nil {
				faults[n] = e
			}
			if faults[n] != nil {
				cancel(faults[n].clone())
			}
		})
	}
	wg.Wait()
	for _, e := range faults {
		if e != nil {
			return e // after a first failure the others report the same one, as their context's cause
		}
	}
	all := make([]json.RawMessage, len(items))
	for n, i := range items {
		all[n] = responses[distinct[i.ID]]
	}
	return a.guard(LegEncode, "merge", func() error { return a.f.encoder.Merge(a.s, all) })
}

func (a *attempt) encodeItem(ctx context.Context, n int, item connector.Item) (_ json.RawMessage, e *Error) {
	ep := &a.s.Encode[n%len(a.s.Encode)]
	ctx, done := a.span(ctx, "encode", ep, http.MethodPost)
	defer func() { done(e) }()
	leg := contract.NewLeg(a.s.Request)
	if e := a.guard(LegEncode, "describe", func() error { return a.f.encoder.Encode(a.s, item, leg) }); e != nil {
		return nil, e
	}
	leg.SetHeader(headerRequestID, fmt.Sprintf("%s:%d", a.s.ID, n)) // each item's request is one of its own
	a.watch.Limit(a.f.limits.Prefill)                               // anew with each item
	o := &LegOutcome{Leg: LegEncode}
	header, body, e := a.sendWhole(ctx, *ep, leg, o)
	switch {
	case e != nil:
		return nil, e
	case o.Status/100 == 4:
		return nil, a.refused(o, header, body)
	case !serves(o.Status) || !json.Valid(body):
		return nil, a.unusable(o, nil, "an encode engine failed")
	}
	return body, nil
}
