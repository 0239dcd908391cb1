// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"
)

// book keeps all measurements of counters and histograms, in their order.
type book struct {
	metricnoop.MeterProvider
	mu  sync.Mutex
	all []measure
}

type measure struct {
	name   string
	labels attribute.Set
	value  float64
}

func (b *book) Meter(string, ...metric.MeterOption) metric.Meter { return page{book: b} }

func (b *book) write(name string, labels attribute.Set, v float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all = append(b.all, measure{name, labels, v})
}

func (b *book) list() []measure {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.all)
}

// of returns the values of a metric with these labels, as "name label=value …", and with no other but pd.connector.
func (b *book) of(key string) (values []float64) {
	for _, m := range b.list() {
		own := m.name
		for _, kv := range m.labels.ToSlice() {
			if kv.Key != "pd.connector" {
				own += " " + string(kv.Key) + "=" + kv.Value.String()
			}
		}
		if own == key {
			values = append(values, m.value)
		}
	}
	return values
}

// labels returns the values of these labels of each measurement of a metric, which may end in a star.
func (b *book) labels(name string, labels ...attribute.Key) (all []string) {
	prefix, any := strings.CutSuffix(name, "*")
	for _, m := range b.list() {
		if m.name != prefix && (!any || !strings.HasPrefix(m.name, prefix)) {
			continue
		}
		var values []string
		for _, l := range labels {
			v, _ := m.labels.Value(l)
			values = append(values, v.AsString())
		}
		all = append(all, strings.Join(values, " "))
	}
	return all
}

// rescues returns what was told of each rescue: its result and its reason.
func (b *book) rescues() []string { return b.labels("pd.rescues", "pd.result", "pd.reason") }

// why returns how often a counter of attempts was told this error type and reason.
func (b *book) why(counter, code, reason string) int {
	return times(b.labels(counter, "error.type", "pd.reason"), code+" "+reason)
}

// count returns how often a metric was measured.
func (b *book) count(name string) int { return len(b.labels(name)) }

// times returns how often one stands among all.
func times(all []string, one string) int {
	return len(slices.DeleteFunc(slices.Clone(all), func(s string) bool { return s != one }))
}

type page struct {
	metricnoop.Meter
	book *book
}

func (p page) Int64Counter(name string, _ ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return bookCounter{name: name, book: p.book}, nil
}

func (p page) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return bookHistogram{name: name, book: p.book}, nil
}

type bookCounter struct {
	metricnoop.Int64Counter
	name string
	book *book
}

func (c bookCounter) Add(_ context.Context, n int64, opts ...metric.AddOption) {
	c.book.write(c.name, metric.NewAddConfig(opts).Attributes(), float64(n))
}

type bookHistogram struct {
	metricnoop.Float64Histogram
	name string
	book *book
}

func (bookHistogram) Enabled(context.Context) bool { return true }

func (h bookHistogram) Record(_ context.Context, v float64, opts ...metric.RecordOption) {
	h.book.write(h.name, metric.NewRecordConfig(opts).Attributes(), v)
}

// tree keeps spans with their parents.
type tree struct {
	tracenoop.TracerProvider
	mu     sync.Mutex
	spans  []*node
	events []string // "span>event key=value …"
}

type node struct {
	tracenoop.Span
	tree         *tree
	name, parent string
	attributes   map[string]string
	ended        int
}

func (x *tree) Tracer(string, ...trace.TracerOption) trace.Tracer { return planter{tree: x} }

type planter struct {
	tracenoop.Tracer
	tree *tree
}

func (p planter) Start(ctx context.Context, name string, o ...trace.SpanStartOption) (context.Context, trace.Span) {
	n := &node{tree: p.tree, name: name, attributes: map[string]string{}}
	if parent, ok := trace.SpanFromContext(ctx).(*node); ok {
		n.parent = parent.name
	}
	config := trace.NewSpanStartConfig(o...)
	n.SetAttributes(config.Attributes()...)
	p.tree.mu.Lock()
	defer p.tree.mu.Unlock()
	p.tree.spans = append(p.tree.spans, n)
	return trace.ContextWithSpan(ctx, n), n
}

func (n *node) SetAttributes(kv ...attribute.KeyValue) {
	n.tree.mu.Lock()
	defer n.tree.mu.Unlock()
	for _, a := range kv {
		n.attributes[string(a.Key)] = a.Value.String()
	}
}

func (n *node) AddEvent(name string, o ...trace.EventOption) {
	event := n.name + ">" + name
	config := trace.NewEventConfig(o...)
	for _, a := range config.Attributes() {
		event += " " + string(a.Key) + "=" + a.Value.String()
	}
	n.tree.mu.Lock()
	defer n.tree.mu.Unlock()
	n.tree.events = append(n.tree.events, event)
}

func (n *node) End(...trace.SpanEndOption) {
	n.tree.mu.Lock()
	defer n.tree.mu.Unlock()
	n.ended++
}

// list returns all spans as "parent>name", each of which must have ended once.
func (x *tree) list(t *testing.T) []string {
	t.Helper()
	x.mu.Lock()
	defer x.mu.Unlock()
	var all []string
	for _, n := range x.spans {
		assert.Equal(t, 1, n.ended, n.name)
		all = append(all, n.parent+">"+n.name)
	}
	slices.Sort(all)
	return all
}
