// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
)

// Request is one client's request, to which all that is recorded of it belongs. Its methods may be called concurrently.
type Request struct {
	*Instruments
	Start  time.Time
	client context.Context // the client's
	api    connector.API
	span   trace.Span // nil without tracing
}

// Failure is why something failed; zero if it has not.
type Failure struct {
	Code, Leg string
	Endpoint  string // of the engine that failed; in spans only
	Status    int    // of its response
}

// Usage are the tokens of an attempt that has served: see pdflow.Usage.
type Usage struct{ Input, Output, Cached, Reused int64 }

// Request begins a request of a client that has named model. The context that it returns has the request's span.
func (t *Instruments) Request(ctx context.Context, r *connector.ClientRequest, model, id string,
	header http.Header) (Request, context.Context) {
	x := Request{Instruments: t, Start: time.Now(), client: ctx, api: r.API}
	if t.tracer == nil {
		return x, ctx
	}
	ctx = t.config.Propagator.Extract(ctx, propagation.HeaderCarrier(header))
	ctx, x.span = t.tracer.Start(ctx, t.config.SpanName(t.config.Connector, "request"), trace.WithAttributes(
		attribute.String("gen_ai.operation.name", operation(r.API)),
		attribute.String("pd.connector", t.config.Connector), attribute.String("pd.order", t.config.Order),
		attribute.String("pd.request_id", id),
		attribute.String("pd.api", r.API.String()), attribute.String("gen_ai.request.model", model),
		attribute.Bool("gen_ai.request.stream", r.Stream)))
	if model != r.Model {
		x.span.SetAttributes(attribute.String("gen_ai.response.model", r.Model))
	}
	return x, ctx
}

// End ends the request. reason is why its picker let one engine serve, or two, "" if it has not said. u are its tokens
// if it was served.
func (x *Request) End(mode, reason, code string, u Usage) {
	if x.recorded {
		took := time.Since(x.Start).Seconds()
		x.requests.Record(x.client, took, x.set(labels{mode: mode, reason: reason, code: code}).record...)
		if x.genAI != nil {
			x.genAI.requests.Record(x.client, took, x.genAI.with(x.api, code))
		}
	}
	if x.span == nil {
		return
	}
	x.span.SetAttributes(attribute.String("pd.mode", mode))
	if reason != "" {
		x.span.SetAttributes(attribute.String("pd.reason", reason))
	}
	if u.Input > 0 || u.Output > 0 {
		x.span.SetAttributes(attribute.Int64("gen_ai.usage.input_tokens", u.Input),
			attribute.Int64("gen_ai.usage.output_tokens", u.Output))
	}
	endSpan(x.span, code)
}

// Step opens a span for a part of an attempt that is no leg of its own, and returns what ends it. Its requests, if it
// has any, go to e, by the method if that is known.
func (x *Request) Step(ctx context.Context, operation string, s *connector.Session, e *discovery.Endpoint,
	method string) (context.Context, func(code string)) {
	if x.tracer == nil {
		return ctx, func(string) {}
	}
	attributes := []attribute.KeyValue{attribute.String("pd.connector", x.config.Connector),
		attribute.String("pd.session_id", s.ID), attribute.Int("pd.attempt", s.Attempt)}
	kind := trace.SpanKindInternal
	if e != nil {
		kind, attributes = trace.SpanKindClient, append(attributes, engine(e, method)...)
	}
	ctx, span := x.tracer.Start(ctx, x.config.SpanName(x.config.Connector, operation), trace.WithSpanKind(kind),
		trace.WithAttributes(attributes...))
	return ctx, func(code string) { endSpan(span, code) }
}

func endSpan(s trace.Span, code string) {
	if code != "" {
		s.SetAttributes(attribute.String("error.type", code))
		s.SetStatus(codes.Error, code)
	}
	s.End()
}

// Session counts an attempt that has ended.
func (x *Request) Session(mode, reason, code string) {
	if x.recorded {
		x.sessions.Add(x.client, 1, x.set(labels{mode: mode, reason: reason, code: code}).add...)
	}
}

// Expired counts a handoff that nobody read: P's blocks wait for the lease.
func (x *Request) Expired() { x.expired.Add(x.client, 1, x.base.add...) }

// Tokens adds up the tokens of an attempt that has served.
func (x *Request) Tokens(u Usage) {
	if !x.recorded {
		return
	}
	for _, c := range [...]struct {
		kind string
		n    int64
	}{{"input", u.Input}, {"output", u.Output}, {"cached", u.Cached}} {
		if c.n > 0 {
			x.tokens.Add(x.client, c.n, x.set(labels{token: c.kind}).add...)
		}
	}
	x.genAI.counted(x, u)
	if u.Reused > 0 {
		x.kvTokens.Add(x.client, u.Reused, x.base.add...)
	}
}

// Streamed records how fast the stream was that the client got: its first event and its end, its tokens if it is whole,
// and when the handoff came, or zero times. Any other response comes whole: its first byte says when its last token was
// made.
func (x *Request) Streamed(mode string, first, end time.Time, output int64, handoff time.Time) {
	if !x.recorded {
		return
	}
	set := x.set(labels{mode: mode}).record
	wait, each := first.Sub(x.Start).Seconds(), 0.0
	x.firstChunk.Record(x.client, wait, set...)
	if !handoff.IsZero() && first.After(handoff) {
		x.transfers.Record(x.client, first.Sub(handoff).Seconds(), x.base.record...)
	}
	if output > 1 {
		each = end.Sub(first).Seconds() / float64(output-1)
		x.perToken.Record(x.client, each, set...)
	}
	x.genAI.streamed(x, wait, each, output)
}

// Retried counts that a failed attempt is retried, once there are engines for it, and why.
func (x *Request) Retried(why string, f Failure) { x.tell(x.retries, "pd.retry", why, f) }

// NotRetried counts that a failed attempt is not retried, and why.
func (x *Request) NotRetried(why string, f Failure) { x.tell(x.unretried, "pd.retry.skipped", why, f) }

// Hedged counts what came of a second prefill.
func (x *Request) Hedged(result string) { x.tell(x.hedges, "pd.hedge", result, Failure{}) }

// tell counts an event and puts it into the request's span.
func (x *Request) tell(counter metric.Int64Counter, event, reason string, f Failure) {
	counter.Add(x.client, 1, x.set(labels{code: f.Code, reason: reason, leg: f.Leg}).add...)
	if x.span != nil {
		var attributes []attribute.KeyValue
		if f.Code != "" {
			attributes = append(attributes, attribute.String("error.type", f.Code))
		}
		if f.Endpoint != "" {
			attributes = append(attributes, attribute.String("pd.endpoint", f.Endpoint))
		}
		if f.Status != 0 {
			attributes = append(attributes, attribute.Int("http.response.status_code", f.Status))
		}
		x.span.AddEvent(event, trace.WithAttributes(append(attributes, attribute.String("pd.reason", reason))...))
	}
}

// FellBack counts a request that is served otherwise than configured.
func (x *Request) FellBack(code string) {
	x.fallbacks.Add(x.client, 1, x.set(labels{code: code}).add...)
	if x.span != nil {
		x.span.SetAttributes(attribute.Bool("pd.fallback", true))
		x.span.AddEvent("pd.fallback", trace.WithAttributes(attribute.String("error.type", code)))
	}
}

// Silent notes that decode is silent in mid-stream: well, ill or for too long.
func (x *Request) Silent(result string) {
	x.silences.Add(x.client, 1, x.set(labels{result: result}).add...)
	if x.span != nil {
		x.span.AddEvent("pd.silence", trace.WithAttributes(attribute.String("pd.result", result)))
	}
}

// Rescue notes what became of a stream whose decode engine died: rescued, with the code of its failure; failed, with
// the code of the rescue's; or refused, with why it cannot go on.
func (x *Request) Rescue(result, reason string) {
	x.rescues.Add(x.client, 1, x.set(labels{reason: reason, result: result}).add...)
	if x.span != nil {
		x.span.AddEvent("pd.rescue", trace.WithAttributes(attribute.String("pd.result", result),
			attribute.String("pd.reason", reason)))
	}
}

// Orphaned counts a decode leg that waits for a prefill in vain.
func (x *Request) Orphaned() { x.orphans.Add(x.client, 1, x.base.add...) }

// Released counts a handoff that decode released.
func (x *Request) Released() { x.released.Add(x.client, 1, x.base.add...) }

// RanOn counts a prefill leg that has ended after its request.
func (x *Request) RanOn(code string) { x.ranOn.Add(x.client, 1, x.set(labels{code: code}).add...) }

// Unsupported counts a request that two engines cannot carry, by the member that prevents it.
func (x *Request) Unsupported(member string) {
	x.unsupported.Add(x.client, 1, x.set(labels{reason: member}).add...)
}

// Handoff records the age of a handoff when decode is described.
func (x *Request) Handoff(age time.Duration) {
	if x.recorded {
		x.handoffAge.Record(x.client, age.Seconds(), x.base.record...)
	}
}

// Leg is one leg of a request. The zero Leg has not begun.
type Leg struct {
	x    *Request
	kind string
	span trace.Span // nil without tracing
}

// LegEnd is what is known of a leg that has ended. Zero times are of what has not happened.
type LegEnd struct {
	Code                        string
	Status                      int
	RequestBytes, ResponseBytes int64
	Start, FirstByte, End       time.Time
}

// Leg begins a leg at an engine. Its span is a sibling of the other leg's. age is that of the handoff, if there is one.
func (x *Request) Leg(ctx context.Context, kind string, e *discovery.Endpoint, s *connector.Session,
	age time.Duration) (Leg, context.Context) {
	l := Leg{x: x, kind: kind}
	if x.tracer == nil {
		return l, ctx
	}
	attributes := append(engine(e, http.MethodPost), attribute.String("pd.leg", kind),
		attribute.String("pd.connector", x.config.Connector), attribute.String("pd.session_id", s.ID),
		attribute.String("pd.pair", s.Prefill.ID+" "+s.Decode.ID), attribute.Int("pd.attempt", s.Attempt))
	ctx, l.span = x.tracer.Start(ctx, x.config.SpanName(x.config.Connector, kind),
		trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(attributes...))
	if age > 0 {
		l.span.SetAttributes(attribute.Float64("pd.handoff.age", age.Seconds()))
	}
	return l, ctx
}

// engine says which engine a span is about, for pdkit's readers and for service maps, which look for the attributes of
// OpenTelemetry's conventions for HTTP clients. method is "" where a connector chooses it.
func engine(e *discovery.Endpoint, method string) []attribute.KeyValue {
	attributes := []attribute.KeyValue{attribute.String("pd.endpoint", e.ID)}
	if e.URL != nil {
		port, err := strconv.Atoi(e.URL.Port())
		if err != nil {
			port = map[string]int{"http": 80, "https": 443}[e.URL.Scheme]
		}
		attributes = append(attributes, attribute.String("server.address", e.URL.Hostname()),
			attribute.Int("server.port", port))
	}
	if method != "" {
		attributes = append(attributes, attribute.String("http.request.method", method))
	}
	return attributes
}

// Begun reports whether the leg has begun.
func (l *Leg) Begun() bool { return l.x != nil }

// End ends the leg.
func (l *Leg) End(e *LegEnd) {
	if l.x.recorded && !e.Start.IsZero() {
		took := 0.0
		if !e.End.IsZero() {
			took = e.End.Sub(e.Start).Seconds()
		}
		l.x.legs.Record(l.x.client, took, l.x.set(labels{leg: l.kind, code: e.Code}).record...)
	}
	if l.span == nil {
		return
	}
	if e.Status != 0 { // it has answered
		l.span.SetAttributes(attribute.Int("http.response.status_code", e.Status))
	}
	l.span.SetAttributes(attribute.Int64("pd.request.bytes", e.RequestBytes),
		attribute.Int64("pd.response.bytes", e.ResponseBytes))
	if !e.FirstByte.IsZero() {
		l.span.SetAttributes(attribute.Float64("pd.time_to_first_byte", e.FirstByte.Sub(e.Start).Seconds()))
	}
	endSpan(l.span, e.Code)
}
