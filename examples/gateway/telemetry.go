// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/pdkit/pdkit/pdflow"
)

// telemetry is where metrics and spans go. A nil provider records nothing, and costs nothing.
type telemetry struct {
	registry *prometheus.Registry
	meters   *sdkmetric.MeterProvider
	tracers  *sdktrace.TracerProvider
	file     *os.File
}

// newTelemetry makes metrics if there is an admin address to read them at, and spans if there is a file to write them
// to.
func newTelemetry(metrics bool, trace string) (*telemetry, error) {
	t := &telemetry{}
	if metrics {
		t.registry = prometheus.NewRegistry()
		t.registry.MustRegister(collectors.NewGoCollector(),
			collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
		exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(t.registry),
			otelprometheus.WithoutScopeInfo(), otelprometheus.WithoutTargetInfo())
		if err != nil {
			return nil, fmt.Errorf("metrics: %w", err)
		}
		t.meters = sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
	}
	if trace == "" {
		return t, nil
	}
	file, err := os.OpenFile(trace, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, errors.New("trace: the file cannot be opened for writing")
	}
	exporter, err := stdouttrace.New(stdouttrace.WithWriter(file))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("trace: %w", err), file.Close())
	}
	t.file, t.tracers = file, sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter))
	return t, nil
}

// options are the flow's options for the providers that there are.
func (t *telemetry) options() []pdflow.Option {
	var opts []pdflow.Option
	if t.meters != nil {
		opts = append(opts, pdflow.WithMeterProvider(t.meters))
	}
	if t.tracers != nil {
		opts = append(opts, pdflow.WithTracerProvider(t.tracers))
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

// handler serves the metrics in Prometheus' format.
func (t *telemetry) handler() http.Handler {
	if t.registry == nil {
		return http.NotFoundHandler()
	}
	return promhttp.HandlerFor(t.registry, promhttp.HandlerOpts{})
}

// close writes what is still in memory.
func (t *telemetry) close(ctx context.Context) error {
	var errs []error
	if t.tracers != nil {
		errs = append(errs, t.tracers.Shutdown(ctx), t.file.Close())
	}
	if t.meters != nil {
		errs = append(errs, t.meters.Shutdown(ctx))
	}
	return errors.Join(errs...)
}
