// SPDX-License-Identifier: Apache-2.0

package states

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	mnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	tnoop "go.opentelemetry.io/otel/trace/noop"
)

// spans counts spans, and their ends. The SDK ignores a second end, which here is a fault.
type spans struct {
	tnoop.TracerProvider
	mu     sync.Mutex
	begun  map[string]int
	twice  bool
	active int
	events map[string]int // with their result and reason
}

func (s *spans) Tracer(string, ...trace.TracerOption) trace.Tracer { return &tracer{s: s} }

type tracer struct {
	tnoop.Tracer
	s *spans
}

func (t *tracer) Start(ctx context.Context, name string, _ ...trace.SpanStartOption) (context.Context, trace.Span) {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	if t.s.begun == nil {
		t.s.begun, t.s.events = map[string]int{}, map[string]int{}
	}
	t.s.begun[name]++
	t.s.active++
	x := &span{s: t.s}
	return trace.ContextWithSpan(ctx, x), x
}

type span struct {
	tnoop.Span
	s    *spans
	over bool
}

func (x *span) End(...trace.SpanEndOption) {
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	x.s.twice = x.s.twice || x.over
	if !x.over {
		x.s.active--
	}
	x.over = true
}

func (x *span) SetAttributes(...attribute.KeyValue) {
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	x.s.twice = x.s.twice || x.over // nobody would see them
}

func (x *span) AddEvent(name string, opts ...trace.EventOption) {
	c := trace.NewEventConfig(opts...)
	set := attribute.NewSet(c.Attributes()...)
	x.s.mu.Lock()
	defer x.s.mu.Unlock()
	x.s.twice = x.s.twice || x.over
	x.s.events[name+outcomeOf(&set)]++
}

// outcomeOf is an attribute set's result and reason.
func outcomeOf(set *attribute.Set) string {
	result, _ := set.Value("pd.result")
	reason, _ := set.Value("pd.reason")
	return " " + result.AsString() + " " + reason.AsString()
}

// eventOf are the counters whose events the request's span has, too.
var eventOf = map[string]string{"pd.rescues": "pd.rescue", "pd.hedges": "pd.hedge", "pd.retries": "pd.retry",
	"pd.retries.skipped": "pd.retry.skipped"}

func (s *spans) check(breach func(string), requests, legs int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active != 0 || s.twice {
		breach("a span was not ended exactly once")
	}
	if n := s.begun["pd.request"]; n != requests {
		breach(fmt.Sprintf("%d spans of %d requests", n, requests))
	}
	if n := s.begun["pd.prefill"] + s.begun["pd.decode"]; n != legs {
		breach(fmt.Sprintf("%d spans of %d legs", n, legs))
	}
}

// meter counts how often each instrument was used; a counter's count is its sum.
type meter struct {
	mnoop.MeterProvider
	m *instruments
}

type instruments struct {
	mnoop.Meter
	mu     sync.Mutex
	counts map[string]int
}

func (m *meter) init()                                            { m.m = &instruments{counts: map[string]int{}} }
func (m *meter) Meter(string, ...metric.MeterOption) metric.Meter { return m.m }

func (m *meter) count(name string) int {
	m.m.mu.Lock()
	defer m.m.mu.Unlock()
	return m.m.counts[name]
}

// events are what was counted that spans have events of.
func (m *meter) events() map[string]int {
	m.m.mu.Lock()
	defer m.m.mu.Unlock()
	list := maps.Clone(m.m.counts)
	maps.DeleteFunc(list, func(name string, _ int) bool { return !strings.Contains(name, " ") })
	return list
}

func (m *meter) check(breach func(string), want map[string]int) {
	for name, n := range want {
		if got := m.count(name); got != n {
			breach(fmt.Sprintf("%s was recorded %d times, not %d", name, got, n))
		}
	}
}

func (i *instruments) add(name string, n int) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.counts[name] += n
}

func (i *instruments) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram,
	error) {
	return histogram{name: name, i: i}, nil
}

func (i *instruments) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return counter{name: name, i: i}, nil
}

type histogram struct {
	mnoop.Float64Histogram
	name string
	i    *instruments
}

func (h histogram) Record(context.Context, float64, ...metric.RecordOption) { h.i.add(h.name, 1) }

type counter struct {
	mnoop.Int64Counter
	name string
	i    *instruments
}

func (c counter) Add(_ context.Context, n int64, opts ...metric.AddOption) {
	c.i.add(c.name, int(n))
	if event, ok := eventOf[c.name]; ok {
		c.i.add(event+outcomeOf(new(metric.NewAddConfig(opts).Attributes())), int(n))
	}
}
