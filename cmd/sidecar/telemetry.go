// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/exporters/stdout/stdouttrace"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/pdkit/pdkit/cmd/otlp"
	"github.com/pdkit/pdkit/pdflow"
)

// telemetry is where metrics and spans go. A nil provider records nothing and costs nothing.
type telemetry struct {
	registry *prometheus.Registry
	meters   *sdkmetric.MeterProvider
	tracers  *sdktrace.TracerProvider
}

func newTelemetry(ctx context.Context, f *flags, getenv func(string) string, out io.Writer) (*telemetry, error) {
	t := &telemetry{}
	if f.metrics != "" {
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
	if !f.tracing {
		return t, nil
	}
	exporter, err := newSpanExporter(ctx, f, getenv("OTEL_TRACES_EXPORTER"), out)
	if err != nil {
		return nil, fmt.Errorf("--tracing: %w", err)
	}
	if exporter == nil {
		return t, nil
	}
	ratio, err := strconv.ParseFloat(cmp.Or(getenv("OTEL_TRACES_SAMPLER_ARG"), "0.1"), 64)
	if err != nil {
		ratio = 0.1
	}
	t.tracers = sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(ratio))),
		sdktrace.WithResource(otlp.NewResource(ctx, "pdkit-sidecar")))
	return t, nil
}

// newSpanExporter makes the exporter of OTEL_TRACES_EXPORTER, or nil for one that is not here. The variables and
// defaults are those of llm-d-router ebab6879, pkg/common/observability/tracing: spans go to the log unless otlp is
// asked for, and OTLP is gRPC.
func newSpanExporter(ctx context.Context, f *flags, kind string, out io.Writer) (sdktrace.SpanExporter, error) {
	switch kind {
	case "", "console":
		return stdouttrace.New(stdouttrace.WithWriter(out))
	case "otlp":
		return otlp.NewSpanExporter(ctx, otlp.GRPC)
	}
	f.warn("--tracing: spans are not sent, since OTEL_TRACES_EXPORTER is neither otlp nor console; traces go on to " +
		"the engines")
	return nil, nil
}

// options are the flow's options for the providers that exist.
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

// handler serves the metrics in Prometheus' format.
func (t *telemetry) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(t.registry, promhttp.HandlerOpts{}))
	return mux
}

// close writes the records that are still in memory.
func (t *telemetry) close(ctx context.Context) error {
	var errs []error
	if t.tracers != nil {
		errs = append(errs, t.tracers.Shutdown(ctx))
	}
	if t.meters != nil {
		errs = append(errs, t.meters.Shutdown(ctx))
	}
	return errors.Join(errs...)
}
