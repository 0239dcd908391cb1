// SPDX-License-Identifier: Apache-2.0

package admit

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

const scope = "github.com/pdkit/pdkit/pdflow/admit"

var waits = []float64{0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10}

type telemetry struct {
	wait    metric.Float64Histogram
	refusal metric.Int64Counter
	queued  metric.Registration
	base    metric.MeasurementOption
	reasons map[string]metric.MeasurementOption

	refusals map[string]*atomic.Int64 // by reason, for State
}

func newTelemetry(a *admission) (*telemetry, error) {
	mp := a.o.MeterProvider
	if mp == nil {
		mp = noop.NewMeterProvider()
	}
	m := mp.Meter(scope)
	t := &telemetry{base: metric.WithAttributeSet(attribute.NewSet(a.o.Attributes...)),
		reasons: map[string]metric.MeasurementOption{}, refusals: map[string]*atomic.Int64{}}
	for _, reason := range []string{reasonFull, reasonWait, reasonTimeout} {
		t.refusals[reason] = new(atomic.Int64)
		t.reasons[reason] = metric.WithAttributeSet(attribute.NewSet(append([]attribute.KeyValue{
			attribute.String("pd.reason", reason)}, a.o.Attributes...)...))
	}
	var errs [4]error
	t.wait, errs[0] = m.Float64Histogram("pd.admission.wait", metric.WithUnit("s"),
		metric.WithDescription("How long admitted requests waited that had to"),
		metric.WithExplicitBucketBoundaries(waits...))
	t.refusal, errs[1] = m.Int64Counter("pd.admission.refused", metric.WithUnit("{request}"),
		metric.WithDescription("Requests refused because of overload, by reason"))
	queued, err := m.Int64ObservableUpDownCounter("pd.admission.queued", metric.WithUnit("{request}"),
		metric.WithDescription("Requests that wait for an engine with room"))
	if errs[2] = err; err == nil {
		t.queued, errs[3] = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
			o.ObserveInt64(queued, int64(a.queued()), t.base)
			return nil
		}, queued)
	}
	return t, errors.Join(errs[:]...)
}

func (t *telemetry) waited(ctx context.Context, d time.Duration) {
	t.wait.Record(ctx, d.Seconds(), t.base)
}

func (t *telemetry) refused(ctx context.Context, reason string) {
	t.refusals[reason].Add(1)
	t.refusal.Add(ctx, 1, t.reasons[reason])
}

func (t *telemetry) close() error { return t.queued.Unregister() }
