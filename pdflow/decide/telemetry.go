// SPDX-License-Identifier: Apache-2.0

package decide

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

const scope = "github.com/pdkit/pdkit/pdflow/decide"

// kind is a decision as metrics know it.
type kind struct {
	action Action
	reason string
}

// kindsMost bounds the series that a policy of the host can make by its reasons.
const kindsMost = 64

// counted is how often a decision was made.
type counted struct {
	n  atomic.Int64
	as []metric.AddOption
}

// telemetry counts decisions for State, and for the program's counter, which goes on where another picker follows this
// one.
type telemetry struct {
	s          *shared
	decisions  metric.Int64Counter
	registered metric.Registration
	mu         sync.RWMutex
	counts     map[kind]*counted
}

func newTelemetry(s *shared) (*telemetry, error) {
	mp := s.o.MeterProvider
	if mp == nil {
		mp = noop.NewMeterProvider()
	}
	m := mp.Meter(scope)
	t := &telemetry{s: s, counts: map[kind]*counted{}}
	var errs [3]error
	var wrong, doubtful metric.Float64ObservableGauge
	t.decisions, errs[0] = m.Int64Counter("pd.decisions", metric.WithUnit("{attempt}"),
		metric.WithDescription("Attempts by what was decided for them, or would have been in a dry run"))
	wrong, errs[1] = m.Float64ObservableGauge("pd.decision.error", metric.WithUnit("1"),
		metric.WithDescription("Mean relative error of what was predicted lately, of TTFT and of ITL"))
	doubtful, errs[2] = m.Float64ObservableGauge("pd.decision.doubtful", metric.WithUnit("{model}"),
		metric.WithDescription("1 where the error is above its bound, so that no prediction counts"))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	var err error
	t.registered, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		mean, n := s.books.meanErrors()
		for i, objective := range [2]string{"ttft", "itl"} {
			if n[i] > 0 {
				o.ObserveFloat64(wrong, mean[i], t.with(attribute.String("pd.objective", objective)))
			}
		}
		is := 0.0
		if s.books.doubtful() {
			is = 1
		}
		o.ObserveFloat64(doubtful, is, t.with())
		return nil
	}, wrong, doubtful)
	return t, err
}

// with are the attributes of all metrics, and more.
func (t *telemetry) with(more ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(append(slices.Clone(t.s.o.Attributes), more...)...))
}

func (t *telemetry) count(a Action, reason string) {
	k := kind{a, reason}
	t.mu.RLock()
	n := t.counts[k]
	t.mu.RUnlock()
	if n == nil {
		t.mu.Lock()
		if len(t.counts) >= kindsMost {
			k.reason = "other"
		}
		if n = t.counts[k]; n == nil {
			n = &counted{as: []metric.AddOption{t.with(attribute.String("pd.action", k.action.String()),
				attribute.String("pd.reason", k.reason), attribute.Bool("pd.dry_run", t.s.o.DryRun))}}
			t.counts[k] = n
		}
		t.mu.Unlock()
	}
	n.n.Add(1)
	t.decisions.Add(context.Background(), 1, n.as...)
}

func (t *telemetry) list() []Count {
	t.mu.RLock()
	defer t.mu.RUnlock()
	all := make([]Count, 0, len(t.counts))
	for k, n := range t.counts {
		all = append(all, Count{k.action, k.reason, n.n.Load()})
	}
	return all
}

func (t *telemetry) close() error { return t.registered.Unregister() }
