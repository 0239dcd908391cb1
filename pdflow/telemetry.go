// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/internal/telemetry"
)

func newTelemetry(f *Flow) (*telemetry.Instruments, error) {
	t := &f.opts.telemetry
	c := telemetry.Config{Version: built, Connector: f.name, Order: f.order.String(),
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
	return telemetry.Failure{Code: string(e.Code), Leg: string(e.Leg), Endpoint: e.Endpoint, Status: e.Status}
}

// span opens a span for a part of an attempt that is no leg of its own, and returns what ends it. Its requests, if it
// has any, go to e, by the method if that is known.
func (a *attempt) span(ctx context.Context, operation string, e *discovery.Endpoint, method string) (context.Context,
	func(*Error)) {
	ctx, end := a.x.tel.Step(ctx, operation, a.s, e, method)
	return ctx, func(e *Error) { end(codeLabel(e)) }
}

// failedLoad reports whether decode has answered with an error of its own, which says that it has not got prefill's KV:
// it had no room, its load failed, or it never looked (docs/protocols/nixl.md, recordings 57 and 52).
func (a *attempt) failedLoad() bool {
	e := a.out.Err
	return e.Leg == LegDecode && e.Code == CodeDecodeFailed && (a.out.Decode.Status >= 500 || e.Status >= 500)
}

// recordEnd counts an attempt that has ended.
func (a *attempt) recordEnd() {
	a.x.tel.Session(string(a.out.Mode), a.out.Reason, codeLabel(a.out.Err))
	switch {
	case a.out.Err == nil:
		a.x.tel.Tokens(telemetry.Usage(a.out.Usage))
	case a.p.Load() != nil && a.f.traits.Handoff.Lease > 0 && (a.out.Decode.Status == 0 || a.unread || a.failedLoad()):
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
