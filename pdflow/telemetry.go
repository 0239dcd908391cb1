// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/pdkit/pdkit/connector"
)

// scope is the name of the SDK's telemetry.
const scope = "github.com/pdkit/pdkit/pdflow"

// telemetry is a flow's instruments, made once. Attribute sets are cached: there are few, and each is used for ever. No
// metric is labelled by endpoint, since engines come and go.
type telemetry struct {
	tracer     trace.Tracer // nil without a provider: then no span costs anything
	propagator propagation.TextMapPropagator
	connector  string
	attributes []attribute.KeyValue // of every metric

	requests, firstChunk, legs, handoffAge metric.Float64Histogram
	transfers, perToken                    metric.Float64Histogram
	sessions, expired, retries, fallbacks  metric.Int64Counter
	unsupportedN, kvTokens, orphans, ranOn metric.Int64Counter
	unretried, rescues, released, hedges   metric.Int64Counter
	tokens                                 metric.Int64Counter
	active                                 metric.Registration
	genAI                                  *genAI // nil: off
	recorded                               bool

	spanName func(connector, operation string) string

	mu   sync.RWMutex
	sets map[labels]*labelSet
	base *labelSet
}

// labelSet is one attribute set as the instruments take it: slices that are made once, and not at each call.
type labelSet struct {
	add    []metric.AddOption
	record []metric.RecordOption
}

// labels are the attributes of all our metrics; empty ones are left out.
type labels struct{ leg, mode, code, reason, result, token string }

var durations = []float64{0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}

func newTelemetry(f *Flow) (*telemetry, error) {
	t := &telemetry{propagator: f.opts.telemetry.Propagator, connector: f.name, attributes: f.opts.telemetry.Attributes,
		sets: map[labels]*labelSet{}, spanName: f.opts.telemetry.SpanName}
	if t.spanName == nil {
		t.spanName = func(_, operation string) string { return "pd." + operation }
	}
	if t.propagator == nil {
		t.propagator = propagation.TraceContext{}
	}
	if tp := f.opts.telemetry.TracerProvider; tp != nil {
		t.tracer = tp.Tracer(scope, trace.WithInstrumentationVersion(version))
	}
	t.base = t.set(labels{})
	mp := f.opts.telemetry.MeterProvider
	if t.recorded = mp != nil; !t.recorded {
		mp = noop.NewMeterProvider()
	}
	m := mp.Meter(scope, metric.WithInstrumentationVersion(version))
	var errs []error
	hist := func(name, unit, help string) metric.Float64Histogram {
		h, err := m.Float64Histogram(name, metric.WithUnit(unit), metric.WithDescription(help),
			metric.WithExplicitBucketBoundaries(durations...))
		errs = append(errs, err)
		return h
	}
	count := func(name, unit, help string) metric.Int64Counter {
		c, err := m.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return c
	}
	t.requests = hist("pd.request.duration", "s", "Requests, from the body's last byte to the response's end")
	t.firstChunk = hist("pd.time_to_first_chunk", "s",
		"Streams, from the body's last byte to decode's first event with content")
	t.perToken = hist("pd.time_per_output_token", "s",
		"Streams, from the first event to the end, by each token after the first")
	t.legs = hist("pd.leg.duration", "s", "Legs, from sending to the end of the response")
	t.handoffAge = hist("pd.handoff.age", "s", "Age of the KV handoff when decode was described")
	t.transfers = hist("pd.transfer.duration", "s",
		"Streams, from the handoff's arrival to decode's first event: the KV's transfer and decode's queue")
	t.sessions = count("pd.sessions", "{session}", "Attempts that have ended, by their outcome")
	t.tokens = count("pd.tokens", "{token}", "Tokens as engines count them: input, output, and of the input those "+
		"that prefill had in its cache")
	t.expired = count("pd.sessions.expired", "{session}",
		"Attempts whose handoff became too old, or was left to its lease")
	t.retries = count("pd.retries", "{attempt}", "Attempts after the first, by why they were made")
	t.hedges = count("pd.hedges", "{attempt}", "Second prefills beside slow ones, by what came of them")
	t.unretried = count("pd.retries.skipped", "{attempt}", "Failed attempts that were not retried, by the reason")
	t.fallbacks = count("pd.fallbacks", "{request}", "Requests served otherwise than configured")
	t.unsupportedN = count("pd.unsupported", "{request}",
		"Requests that two engines cannot carry, by the member that prevents it")
	t.kvTokens = count("pd.kv.tokens", "{token}", "Prompt tokens that decode did not compute, where its "+
		"response tells")
	t.orphans = count("pd.orphans", "{session}", "Decode legs that were sent and whose prefill gave them nothing")
	t.ranOn = count("pd.prefills.ran_on", "{leg}",
		"Prefill legs that ran on after their request, since their protocol lets them finish")
	t.rescues = count("pd.rescues", "{stream}", "Streams whose decode engine died, by whether they went on")
	t.released = count("pd.handoffs.released", "{handoff}",
		"Handoffs of requests that decode refused, which the flow then had decode release")
	if f.opts.telemetry.GenAI != "" && t.recorded {
		var err error
		t.genAI, err = newGenAI(m, f.opts.telemetry.GenAI)
		errs = append(errs, err)
	}
	if err := errors.Join(append(errs, t.observeActive(m, f))...); err != nil {
		return nil, err
	}
	return t, nil
}

// observeActive counts what is in flight when it is asked, which costs requests nothing.
func (t *telemetry) observeActive(m metric.Meter, f *Flow) error {
	active, err := m.Int64ObservableUpDownCounter("pd.sessions.active", metric.WithUnit("{session}"),
		metric.WithDescription("Requests in flight"))
	if err != nil {
		return err
	}
	running, err := m.Int64ObservableUpDownCounter("pd.prefills.running_on", metric.WithUnit("{leg}"),
		metric.WithDescription("Prefill legs of requests that are over, which their protocol lets finish"))
	if err != nil {
		return err
	}
	labels := metric.WithAttributeSet(t.attributeSet(labels{}))
	t.active, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(active, int64(f.live.count()), labels)
		if f.traits.Ending.PrefillFinishes {
			o.ObserveInt64(running, int64(f.runningOn.count()), labels)
		}
		return nil
	}, active, running)
	return err
}

func (t *telemetry) set(l labels) *labelSet {
	t.mu.RLock()
	s, ok := t.sets[l]
	t.mu.RUnlock()
	if ok {
		return s
	}
	option := metric.WithAttributeSet(t.attributeSet(l))
	s = &labelSet{add: []metric.AddOption{option}, record: []metric.RecordOption{option}}
	t.mu.Lock()
	t.sets[l] = s
	t.mu.Unlock()
	return s
}

func (t *telemetry) attributeSet(l labels) attribute.Set {
	kv := append([]attribute.KeyValue{attribute.String("pd.connector", t.connector)}, t.attributes...)
	for _, p := range [...]struct{ k, v string }{{"pd.leg", l.leg}, {"pd.mode", l.mode}, {"error.type", l.code},
		{"pd.reason", l.reason}, {"pd.result", l.result}, {"pd.token.type", l.token}} {
		if p.v != "" {
			kv = append(kv, attribute.String(p.k, p.v))
		}
	}
	return attribute.NewSet(kv...)
}

func codeLabel(e *Error) string {
	if e == nil {
		return ""
	}
	return string(e.Code)
}

func (t *telemetry) startRequest(ctx context.Context, x *exchange) (context.Context, trace.Span) {
	if t.tracer == nil {
		return ctx, nil
	}
	ctx = t.propagator.Extract(ctx, propagation.HeaderCarrier(x.header))
	return t.tracer.Start(ctx, t.spanName(t.connector, "request"), trace.WithAttributes(
		attribute.String("gen_ai.operation.name", operation(x.req.API)),
		attribute.String("pd.connector", x.f.name), attribute.String("pd.order", x.f.order.String()),
		attribute.String("pd.request_id", x.id),
		attribute.String("pd.api", x.req.API.String()), attribute.String("gen_ai.request.model", x.req.Model),
		attribute.Bool("gen_ai.request.stream", x.req.Stream)))
}

func (t *telemetry) endRequest(x *exchange, e *Error) {
	mode := x.served()
	if t.recorded {
		t.requests.Record(x.client, time.Since(x.start).Seconds(),
			t.set(labels{mode: string(mode), code: codeLabel(e)}).record...)
		t.genAI.request(x, e)
	}
	if x.span == nil {
		return
	}
	x.span.SetAttributes(attribute.String("pd.mode", string(mode)))
	if a := x.current.Load(); a != nil && e == nil {
		if u := &a.out.Usage; u.Input > 0 || u.Output > 0 {
			x.span.SetAttributes(attribute.Int64("gen_ai.usage.input_tokens", u.Input),
				attribute.Int64("gen_ai.usage.output_tokens", u.Output))
		}
	}
	endSpan(x.span, e)
}

// step opens a span for a part of an attempt that is no leg of its own, and returns what ends it.
func (a *attempt) step(ctx context.Context, operation, endpoint string) (context.Context, func(*Error)) {
	t := a.f.tel
	if t.tracer == nil {
		return ctx, func(*Error) {}
	}
	attributes := []attribute.KeyValue{attribute.String("pd.connector", a.f.name),
		attribute.String("pd.session_id", a.s.ID), attribute.Int("pd.attempt", a.s.Attempt)}
	if endpoint != "" {
		attributes = append(attributes, attribute.String("pd.endpoint", endpoint))
	}
	ctx, span := t.tracer.Start(ctx, t.spanName(t.connector, operation), trace.WithAttributes(attributes...))
	return ctx, func(e *Error) { endSpan(span, e) }
}

func endSpan(s trace.Span, e *Error) {
	if e != nil {
		s.SetAttributes(attribute.String("error.type", string(e.Code)))
		s.SetStatus(codes.Error, string(e.Code))
	}
	s.End()
}

func (t *telemetry) sessionEnded(a *attempt) {
	if !t.recorded {
		return
	}
	t.sessions.Add(a.x.client, 1, t.set(labels{mode: string(a.mode), code: codeLabel(a.out.Err)}).add...)
	p := a.p.Load()
	switch {
	case a.out.Err == nil:
		t.counted(a)
	case p != nil && a.f.traits.Handoff.Lease > 0 && (a.out.Decode.Status == 0 || a.unread):
		t.expired.Add(a.x.client, 1, t.base.add...) // nobody read P's blocks: they wait for the lease
	}
}

// counted adds up the tokens of an attempt that has served.
func (t *telemetry) counted(a *attempt) {
	u := &a.out.Usage
	for _, c := range [...]struct {
		kind string
		n    int64
	}{{"input", u.Input}, {"output", u.Output}, {"cached", u.Cached}} {
		if c.n > 0 {
			t.tokens.Add(a.x.client, c.n, t.set(labels{token: c.kind}).add...)
		}
	}
	t.genAI.counted(a)
	if u.Reused > 0 {
		t.kvTokens.Add(a.x.client, u.Reused, t.base.add...)
	}
}

// retried counts that the last attempt is retried, once there are engines for it.
func (t *telemetry) retried(x *exchange) { t.tell(x, t.retries, "pd.retry", x.why, x.failure) }

func (t *telemetry) notRetried(x *exchange, reason string, e *Error) {
	t.tell(x, t.unretried, "pd.retry.skipped", reason, e)
}

func (t *telemetry) hedged(x *exchange, reason string) { t.tell(x, t.hedges, "pd.hedge", reason, nil) }

// tell counts an event and puts it into the request's span.
func (t *telemetry) tell(x *exchange, counter metric.Int64Counter, event, reason string, e *Error) {
	l := labels{code: codeLabel(e), reason: reason}
	if e != nil {
		l.leg = string(e.Leg)
	}
	counter.Add(x.client, 1, t.set(l).add...)
	if x.span != nil {
		var attributes []attribute.KeyValue
		if e != nil {
			attributes = append(attributes, attribute.String("error.type", codeLabel(e)))
		}
		x.span.AddEvent(event, trace.WithAttributes(append(attributes, attribute.String("pd.reason", reason))...))
	}
}

func (t *telemetry) fellBack(x *exchange, last *Error) {
	t.fallbacks.Add(x.ctx, 1, t.set(labels{code: codeLabel(last)}).add...)
	if x.span != nil {
		x.span.SetAttributes(attribute.Bool("pd.fallback", true))
		x.span.AddEvent("pd.fallback", trace.WithAttributes(attribute.String("error.type", codeLabel(last))))
	}
}

// rescue notes what became of a stream whose decode engine died: rescued, with the code of its failure; failed, with
// the code of the rescue's; or refused, with why it cannot go on.
func (t *telemetry) rescue(x *exchange, result, reason string) {
	t.rescues.Add(x.client, 1, t.set(labels{reason: reason, result: result}).add...)
	if x.span != nil {
		x.span.AddEvent("pd.rescue", trace.WithAttributes(attribute.String("pd.result", result),
			attribute.String("pd.reason", reason)))
	}
}

func (t *telemetry) orphaned(a *attempt) { t.orphans.Add(a.x.client, 1, t.base.add...) }

func (t *telemetry) unsupported(x *exchange, member string) {
	t.unsupportedN.Add(x.ctx, 1, t.set(labels{reason: member}).add...)
}

func (t *telemetry) handoff(a *attempt, age time.Duration) {
	if t.recorded {
		t.handoffAge.Record(a.ctx, age.Seconds(), t.base.record...)
	}
}

// streamed records how fast the stream was that the client got. Any other response comes whole: its first byte says
// when its last token was made.
func (t *telemetry) streamed(b *Body) {
	a, o := b.a, &b.a.out.Decode
	if !t.recorded || !b.sse || !b.known || a.out.Resumed > 0 {
		return
	}
	t.genAI.streamed(b)
	mode := t.set(labels{mode: string(a.mode)}).record
	t.firstChunk.Record(a.x.client, o.FirstByte.Sub(a.x.start).Seconds(), mode...)
	if p := a.p.Load(); p != nil && a.f.handsOver() && o.FirstByte.After(p.At) {
		t.transfers.Record(a.x.client, o.FirstByte.Sub(p.At).Seconds(), t.base.record...)
	}
	if n := a.out.Usage.Output; o.Err == nil && n > 1 {
		t.perToken.Record(a.x.client, o.End.Sub(o.FirstByte).Seconds()/float64(n-1), mode...)
	}
}

// inject continues the request's trace to an engine. Without a tracer the client's own headers have gone through.
func (t *telemetry) inject(ctx context.Context, h http.Header) {
	if t.tracer != nil {
		t.propagator.Inject(ctx, propagation.HeaderCarrier(h))
	}
}

// legStarted opens a leg's span, a sibling of the other leg's, and tells observers.
func (a *attempt) legStarted(ctx context.Context, leg LegKind) context.Context {
	ep, i := a.s.Prefill.ID, 0
	if leg == LegDecode {
		ep, i = a.s.Decode.ID, 1
	}
	a.begun[i] = true
	if t := a.f.tel; t.tracer != nil {
		name, kind := t.spanName(t.connector, string(leg)), trace.WithSpanKind(trace.SpanKindClient)
		ctx, a.span[i] = t.tracer.Start(ctx, name, kind, trace.WithAttributes(
			attribute.String("pd.leg", string(leg)), attribute.String("pd.connector", a.f.name),
			attribute.String("pd.session_id", a.s.ID),
			attribute.String("pd.endpoint", ep), attribute.String("pd.pair", a.s.Prefill.ID+" "+
				a.s.Decode.ID), attribute.Int("pd.attempt", a.s.Attempt)))
		if leg == LegDecode && a.out.HandoffAge > 0 {
			a.span[i].SetAttributes(attribute.Float64("pd.handoff.age", a.out.HandoffAge.Seconds()))
		}
	}
	for _, o := range a.f.opts.observers {
		if o.LegStart != nil {
			o.LegStart(ctx, a.s, leg)
		}
	}
	return ctx
}

func (a *attempt) legEnded(o *LegOutcome, p *connector.PrefillResult) {
	i := 0
	if o.Leg == LegDecode {
		i = 1
	}
	if !a.begun[i] {
		return
	}
	a.begun[i] = false
	t := a.f.tel
	if t.recorded && !o.Start.IsZero() {
		t.legs.Record(a.x.client, o.Duration().Seconds(),
			t.set(labels{leg: string(o.Leg), code: codeLabel(o.Err)}).record...)
	}
	if s := a.span[i]; s != nil {
		s.SetAttributes(attribute.Int("http.response.status_code", o.Status),
			attribute.Int64("pd.request.bytes", o.RequestBytes), attribute.Int64("pd.response.bytes", o.ResponseBytes))
		if !o.FirstByte.IsZero() {
			s.SetAttributes(attribute.Float64("pd.time_to_first_byte", o.FirstByte.Sub(o.Start).Seconds()))
		}
		endSpan(s, o.Err)
		a.span[i] = nil
	}
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
	if o.Leg == LegPrefill && o.Err == nil { // else the picker is to know first: see exchange.attempt
		a.f.rescues.give(a.place, nil)
	}
}
