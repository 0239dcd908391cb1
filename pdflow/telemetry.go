// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow/internal/telemetry"
)

func newTelemetry(f *Flow) (*telemetry.Instruments, error) {
	t := &f.opts.telemetry
	c := telemetry.Config{Version: version, Connector: f.name, Order: f.order.String(),
		TracerProvider: t.TracerProvider, Propagator: t.Propagator, SpanName: t.SpanName,
		MeterProvider: t.MeterProvider, Attributes: t.Attributes, GenAI: t.GenAI, Active: f.live.Count}
	if f.traits.Ending.PrefillFinishes {
		c.RunningOn = f.runningOn.Count
	}
	return telemetry.New(c)
}

func codeLabel(e *Error) string {
	if e == nil {
		return ""
	}
	return string(e.Code)
}

// failure is an error as telemetry knows it.
func (e *Error) failure() telemetry.Failure {
	if e == nil {
		return telemetry.Failure{}
	}
	return telemetry.Failure{Code: string(e.Code), Leg: string(e.Leg)}
}

// step opens a span for a part of an attempt that is no leg of its own, and returns what ends it.
func (a *attempt) step(ctx context.Context, operation, endpoint string) (context.Context, func(*Error)) {
	ctx, end := a.x.tel.Step(ctx, operation, a.s, endpoint)
	return ctx, func(e *Error) { end(codeLabel(e)) }
}

// recordEnd counts an attempt that has ended.
func (a *attempt) recordEnd() {
	a.x.tel.Session(string(a.out.Mode), codeLabel(a.out.Err))
	switch {
	case a.out.Err == nil:
		a.x.tel.Tokens(telemetry.Usage(a.out.Usage))
	case a.p.Load() != nil && a.f.traits.Handoff.Lease > 0 && (a.out.Decode.Status == 0 || a.unread):
		a.x.tel.Expired()
	}
}

// recordStream records how fast the stream was that the client got.
func (b *Body) recordStream() {
	a, o := b.a, &b.a.out.Decode
	if !b.sse || !b.s.Begun() || a.out.Resumed > 0 {
		return
	}
	output := a.out.Usage.Output
	if o.Err != nil {
		output = 0
	}
	handoff := time.Time{}
	if p := a.p.Load(); p != nil && a.f.handsOver() {
		handoff = p.At
	}
	a.x.tel.Streamed(string(a.out.Mode), o.FirstByte, o.End, output, handoff)
}

// legStarted opens a leg's span and tells observers.
func (a *attempt) legStarted(ctx context.Context, leg LegKind) context.Context {
	ep, of, age := a.s.Prefill.ID, &a.legs.prefill, time.Duration(0)
	if leg == LegDecode {
		ep, of, age = a.s.Decode.ID, &a.legs.decode, a.out.HandoffAge
	}
	*of, ctx = a.x.tel.Leg(ctx, string(leg), ep, a.s, age)
	for _, o := range a.f.opts.observers {
		if o.LegStart != nil {
			o.LegStart(ctx, a.s, leg)
		}
	}
	return ctx
}

func (a *attempt) legEnded(o *LegOutcome, p *connector.PrefillResult) {
	of := &a.legs.prefill
	if o.Leg == LegDecode {
		of = &a.legs.decode
	}
	leg := *of
	if !leg.Begun() {
		return
	}
	*of = telemetry.Leg{}
	leg.End(&telemetry.LegEnd{Code: codeLabel(o.Err), Status: o.Status, RequestBytes: o.RequestBytes,
		ResponseBytes: o.ResponseBytes, Start: o.Start, FirstByte: o.FirstByte, End: o.End})
	_ = a.guard("", "observe", func() error {
		for _, ob := range a.f.opts.observers {
			if ob.LegEnd != nil {
				ob.LegEnd(a.x.client, a.s, o, p)
			}
		}
		return nil
	})
	if o.Leg == LegPrefill && a.prefillDone != nil {
		_ = a.guard("", "done", func() error { a.prefillDone(o); return nil })
	}
}
