// SPDX-License-Identifier: Apache-2.0

// Package telemetry records a flow's requests as metrics and spans. docs/metrics.md and docs/traces.md list them.
package telemetry

import (
	"context"
	"errors"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// Scope is the name of the SDK's telemetry.
const Scope = "github.com/pdkit/pdkit/pdflow"

// Config says what is recorded; see pdflow.Telemetry.
type Config struct {
	Version, Connector, Order string

	TracerProvider trace.TracerProvider
	Propagator     propagation.TextMapPropagator
	SpanName       func(connector, operation string) string
	MeterProvider  metric.MeterProvider
	Attributes     []attribute.KeyValue
	GenAI          string

	Active    func() int // requests in flight
	RunningOn func() int // prefill legs of requests that are over; nil where the protocol has none
}

// Instruments are made once for a flow. Attribute sets are cached: there are few, and each is used for ever. No metric
// is labelled by endpoint, since engines come and go.
type Instruments struct {
	config   Config
	tracer   trace.Tracer // nil without a provider: then no span costs anything
	recorded bool
	histograms
	counters
	genAI  *genAI // nil: off
	active metric.Registration

	mu   sync.RWMutex
	sets map[labels]*labelSet
	base *labelSet
}

type histograms struct {
	requests, firstChunk, legs, handoffAge, transfers, perToken metric.Float64Histogram
}

type counters struct {
	sessions, expired, retries, unretried, hedges, fallbacks, unsupported metric.Int64Counter
	kvTokens, tokens, orphans, ranOn, rescues, released, silences         metric.Int64Counter
}

// labelSet is one attribute set as the instruments take it: slices that are made once, and not at each call.
type labelSet struct {
	add    []metric.AddOption
	record []metric.RecordOption
}

// labels are the attributes of all our metrics; empty ones are left out.
type labels struct{ leg, mode, code, reason, result, token string }

var durations = []float64{0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}

// New makes a flow's instruments. Close must follow.
func New(c Config) (*Instruments, error) {
	if c.SpanName == nil {
		c.SpanName = func(_, operation string) string { return "pd." + operation }
	}
	if c.Propagator == nil {
		c.Propagator = propagation.TraceContext{}
	}
	t := &Instruments{config: c, sets: map[labels]*labelSet{}, recorded: c.MeterProvider != nil}
	if c.TracerProvider != nil {
		t.tracer = c.TracerProvider.Tracer(Scope, trace.WithInstrumentationVersion(c.Version))
	}
	t.base = t.set(labels{})
	mp := c.MeterProvider
	if !t.recorded {
		mp = noop.NewMeterProvider()
	}
	m := mp.Meter(Scope, metric.WithInstrumentationVersion(c.Version))
	errs := t.makeAll(m)
	if c.GenAI != "" && t.recorded {
		var err error
		t.genAI, err = newGenAI(m, &c)
		errs = append(errs, err)
	}
	if err := errors.Join(append(errs, t.observeActive(m))...); err != nil {
		return nil, err
	}
	return t, nil
}

func (t *Instruments) makeAll(m metric.Meter) (errs []error) {
	for _, i := range []struct {
		to         *metric.Float64Histogram
		name, help string
	}{
		{&t.requests, "pd.request.duration", "Requests, from the body's last byte to the response's end"},
		{&t.firstChunk, "pd.time_to_first_chunk",
			"Streams, from the body's last byte to decode's first event with content"},
		{&t.perToken, "pd.time_per_output_token",
			"Streams, from the first event to the end, by each token after the first"},
		{&t.legs, "pd.leg.duration", "Legs, from sending to the end of the response"},
		{&t.handoffAge, "pd.handoff.age", "Age of the KV handoff when decode was described"},
		{&t.transfers, "pd.transfer.duration",
			"Streams, from the handoff's arrival to decode's first event: the KV's transfer and decode's queue"},
	} {
		var err error
		*i.to, err = m.Float64Histogram(i.name, metric.WithUnit("s"), metric.WithDescription(i.help),
			metric.WithExplicitBucketBoundaries(durations...))
		errs = append(errs, err)
	}
	for _, i := range []struct {
		to               *metric.Int64Counter
		name, unit, help string
	}{
		{&t.sessions, "pd.attempts", "{attempt}", "Attempts that have ended, by their outcome"},
		{&t.tokens, "pd.tokens", "{token}", "Tokens as engines count them: input, output, and of the input those " +
			"that prefill had in its cache"},
		{&t.expired, "pd.attempts.expired", "{attempt}",
			"Attempts whose handoff became too old, or was left to its lease"},
		{&t.retries, "pd.retries", "{attempt}", "Attempts after the first, by why they were made"},
		{&t.hedges, "pd.hedges", "{attempt}", "Second prefills beside slow ones, by what came of them"},
		{&t.unretried, "pd.retries.skipped", "{attempt}",
			"Attempts that failed before decode's first byte and were not retried, by the reason"},
		{&t.fallbacks, "pd.fallbacks", "{request}", "Requests served otherwise than configured"},
		{&t.unsupported, "pd.unsupported", "{request}",
			"Requests that two engines cannot carry, by the member that prevents it"},
		{&t.kvTokens, "pd.kv.tokens", "{token}", "Prompt tokens that decode did not compute, where its response tells"},
		{&t.orphans, "pd.orphans", "{attempt}", "Decode legs that were sent and whose prefill gave them nothing"},
		{&t.ranOn, "pd.prefills.ran_on", "{leg}",
			"Prefill legs that ran on after their request, since their protocol lets them finish"},
		{&t.rescues, "pd.rescues", "{stream}", "Streams whose decode engine died, by whether they went on"},
		{&t.silences, "pd.silences", "{silence}",
			"Engines that sent nothing for longer than Timeouts.Idle in mid-stream, by what their probe said"},
		{&t.released, "pd.handoffs.released", "{handoff}",
			"Handoffs of requests that decode refused, which the flow then had decode release"},
	} {
		var err error
		*i.to, err = m.Int64Counter(i.name, metric.WithUnit(i.unit), metric.WithDescription(i.help))
		errs = append(errs, err)
	}
	return errs
}

// observeActive counts what is in flight when it is asked, which costs requests nothing.
func (t *Instruments) observeActive(m metric.Meter) error {
	active, err := m.Int64ObservableUpDownCounter("pd.requests.active", metric.WithUnit("{request}"),
		metric.WithDescription("Requests in flight"))
	if err != nil {
		return err
	}
	running, err := m.Int64ObservableUpDownCounter("pd.prefills.running_on", metric.WithUnit("{leg}"),
		metric.WithDescription("Prefill legs of requests that are over, which their protocol lets finish"))
	if err != nil {
		return err
	}
	set := metric.WithAttributeSet(t.attributeSet(labels{}))
	t.active, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(active, int64(t.config.Active()), set)
		if t.config.RunningOn != nil {
			o.ObserveInt64(running, int64(t.config.RunningOn()), set)
		}
		return nil
	}, active, running)
	return err
}

// Close ends the counting of what is in flight.
func (t *Instruments) Close() error { return t.active.Unregister() }

func (t *Instruments) set(l labels) *labelSet {
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

func (t *Instruments) attributeSet(l labels) attribute.Set {
	kv := append([]attribute.KeyValue{attribute.String("pd.connector", t.config.Connector)}, t.config.Attributes...)
	for _, p := range [...]struct{ k, v string }{{"pd.leg", l.leg}, {"pd.mode", l.mode}, {"error.type", l.code},
		{"pd.reason", l.reason}, {"pd.result", l.result}, {"pd.token.type", l.token}} {
		if p.v != "" {
			kv = append(kv, attribute.String(p.k, p.v))
		}
	}
	return attribute.NewSet(kv...)
}

// Inject continues the request's trace to an engine. Without a tracer the client's own headers have gone through.
func (t *Instruments) Inject(ctx context.Context, carrier propagation.TextMapCarrier) {
	if t.tracer != nil {
		t.config.Propagator.Inject(ctx, carrier)
	}
}
