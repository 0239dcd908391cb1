// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/attribute"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/pdkit/pdkit/cmd/otlp"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/capacity"
)

// telemetry is where metrics and spans go. A nil provider records nothing, and costs nothing.
type telemetry struct {
	registry *prometheus.Registry
	meters   *sdkmetric.MeterProvider
	tracers  *sdktrace.TracerProvider
	file     *os.File
	engines  *engineTotals // what engines count, for the metrics and for the live view
}

// newTelemetry makes metrics if there is an admin address to read them at, and spans if there is a file to write them
// to. Both are also sent to where the environment variables of OpenTelemetry's SDK say. What it returns must be closed,
// also after an error.
func newTelemetry(ctx context.Context, metrics bool, trace string) (*telemetry, error) {
	t := &telemetry{engines: &engineTotals{models: map[string]*capacity.Meter{}}}
	from := otlp.NewResource(ctx, "pdkit-gateway")
	return t, errors.Join(t.trace(ctx, from, trace), t.measure(ctx, from, metrics))
}

// trace makes the provider of spans if there is an exporter for them.
func (t *telemetry) trace(ctx context.Context, from *resource.Resource, file string) error {
	var exporters []sdktrace.SpanExporter
	if file != "" {
		var err error
		if t.file, err = os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
			return errors.New("trace: the file cannot be opened for writing")
		}
		exporter, err := stdouttrace.New(stdouttrace.WithWriter(t.file))
		if err != nil {
			return fmt.Errorf("trace: %w", err)
		}
		exporters = append(exporters, exporter)
	}
	sender, err := otlp.NewSpanExporter(ctx, otlp.HTTP)
	if err != nil {
		return err
	}
	if sender != nil {
		exporters = append(exporters, sender)
	}
	if len(exporters) == 0 {
		return nil
	}
	opts := []sdktrace.TracerProviderOption{sdktrace.WithResource(from)}
	for _, e := range exporters {
		opts = append(opts, sdktrace.WithBatcher(e))
	}
	t.tracers = sdktrace.NewTracerProvider(opts...)
	return nil
}

// measure makes the provider of metrics if there is someone to read them.
func (t *telemetry) measure(ctx context.Context, from *resource.Resource, serve bool) error {
	opts := []sdkmetric.Option{sdkmetric.WithResource(from)}
	if serve {
		t.registry = prometheus.NewRegistry()
		t.registry.MustRegister(collectors.NewGoCollector(),
			collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
		exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(t.registry),
			otelprometheus.WithoutScopeInfo(), otelprometheus.WithoutTargetInfo())
		if err != nil {
			return fmt.Errorf("metrics: %w", err)
		}
		opts = append(opts, sdkmetric.WithReader(exporter))
	}
	sender, err := otlp.NewMetricReader(ctx)
	if err != nil {
		return err
	}
	if sender != nil {
		opts = append(opts, sdkmetric.WithReader(sender))
	}
	if len(opts) > 1 {
		t.meters = sdkmetric.NewMeterProvider(opts...)
	}
	return nil
}

// options are the flow's options for the providers that there are.
func (t *telemetry) options() []pdflow.Option {
	var opts []pdflow.Option
	if t.meters != nil {
		opts = append(opts, pdflow.WithTelemetry(pdflow.Telemetry{MeterProvider: t.meters}))
	}
	if t.tracers != nil {
		opts = append(opts, pdflow.WithTelemetry(pdflow.Telemetry{TracerProvider: t.tracers}))
	}
	return opts
}

// observeBytes shows how much of the budget of bytes in flight is taken, and how often it was used up.
func (t *telemetry) observeBytes(budget *pdflow.Budget) error {
	if t.meters == nil {
		return nil
	}
	m := t.meters.Meter(meterName)
	_, err := m.Int64ObservableGauge("pd.bytes.in_flight", metric.WithUnit("By"),
		metric.WithDescription("Bytes of bodies and prefill responses in flight"),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(budget.InUse())
			return nil
		}))
	_, refusedErr := m.Int64ObservableCounter("pd.bytes.refused", metric.WithUnit("{request}"),
		metric.WithDescription("Requests refused because maxBytesInFlight was used up"),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			o.Observe(budget.Refused())
			return nil
		}))
	return errors.Join(err, refusedErr)
}

// pairProbes returns what counts a model's probes of pairs that ran out of time.
func (t *telemetry) pairProbes(model string) (count func(result string), err error) {
	if t.meters == nil {
		return func(string) {}, nil
	}
	probes, err := t.meters.Meter(meterName).Int64Counter("pd.pair.probes", metric.WithUnit("{probe}"),
		metric.WithDescription("Synthetic probes of pairs that ran out of time, by result"))
	return func(result string) {
		probes.Add(context.Background(), 1, metric.WithAttributes(attribute.String("pd.result", result),
			attribute.String("gen_ai.request.model", model)))
	}, err
}

// handler serves the metrics in Prometheus' format.
func (t *telemetry) handler() http.Handler {
	if t.registry == nil {
		return http.NotFoundHandler()
	}
	return promhttp.HandlerFor(t.registry, promhttp.HandlerOpts{})
}

// close writes and sends what is still in memory, until ctx ends.
func (t *telemetry) close(ctx context.Context) error {
	var spans, metrics error
	var wg sync.WaitGroup
	// side by side: a collector that takes no spans must not use up the time of the metrics
	if t.tracers != nil {
		wg.Go(func() { spans = t.tracers.Shutdown(ctx) })
	}
	if t.meters != nil {
		wg.Go(func() { metrics = t.meters.Shutdown(ctx) })
	}
	wg.Wait()
	if t.file != nil {
		spans = errors.Join(spans, t.file.Close())
	}
	return errors.Join(spans, metrics)
}
