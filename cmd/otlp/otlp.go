// SPDX-License-Identifier: Apache-2.0

// Package otlp sends the spans and metrics of the example programs to where the environment variables of
// OpenTelemetry's SDK say: to a collector (OTLP), to standard output, or nowhere. Without such a variable nothing is
// sent.
//
// It reads the process's environment, since the exporters do so themselves (endpoint, headers, certificates,
// compression, timeout): https://opentelemetry.io/docs/specs/otel/protocol/exporter/.
package otlp

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"

	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// The protocols of OTLP, as OTEL_EXPORTER_OTLP_PROTOCOL has them.
const (
	HTTP = "http/protobuf"
	GRPC = "grpc"
)

// NewSpanExporter returns the exporter of spans that OTEL_TRACES_EXPORTER names: otlp, console (standard output) or
// none. Where that is not set, OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT means otlp. It returns
// nil if none of them is set, for none, and if OTEL_SDK_DISABLED is true.
//
// The protocol, HTTP or GRPC, is that of OTLP where OTEL_EXPORTER_OTLP_TRACES_PROTOCOL and OTEL_EXPORTER_OTLP_PROTOCOL
// are not set. An error names the variable that is wrong, and never its value, which may hold a key.
func NewSpanExporter(ctx context.Context, protocol string) (sdktrace.SpanExporter, error) {
	s := signal{"TRACES", protocol}
	kind, err := s.kind()
	if err != nil || kind == "" {
		return nil, err
	}
	var exporter sdktrace.SpanExporter
	if kind == "otlp" && s.protocol == GRPC && s.setting("PROTOCOL") == "" {
		// autoexport's own default is HTTP, and only a variable could change it
		var o []otlptracegrpc.Option
		if s.setting("ENDPOINT")+s.setting("INSECURE")+s.setting("CERTIFICATE") == "" {
			// the exporter's own default is TLS, which a collector on this host does not have
			o = append(o, otlptracegrpc.WithEndpointURL("http://localhost:4317"))
		}
		exporter, err = otlptracegrpc.New(ctx, o...)
	} else {
		exporter, err = autoexport.NewSpanExporter(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("the exporter of spans: %w", err)
	}
	return exporter, nil
}

// NewMetricReader returns the reader that exports metrics once a minute (OTEL_METRIC_EXPORT_INTERVAL). Its variables
// are those of NewSpanExporter with METRICS in place of TRACES, and its default protocol is HTTP. Its value prometheus
// is an error, since the programs serve their metrics to Prometheus at an address of their own.
//
// The reader has a goroutine until its Shutdown.
func NewMetricReader(ctx context.Context) (sdkmetric.Reader, error) {
	kind, err := signal{"METRICS", HTTP}.kind()
	if err != nil || kind == "" {
		return nil, err
	}
	reader, err := autoexport.NewMetricReader(ctx)
	if err != nil {
		return nil, fmt.Errorf("the exporter of metrics: %w", err)
	}
	return reader, nil
}

// NewResource says who sends: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, and the service where they name none.
func NewResource(ctx context.Context, service string) *resource.Resource {
	// The error is a part of OTEL_RESOURCE_ATTRIBUTES that cannot be read. The providers read it, too, and report that.
	r, _ := resource.New(ctx, resource.WithAttributes(attribute.String("service.name", service)),
		resource.WithTelemetrySDK(), resource.WithFromEnv())
	return r
}

// signal is TRACES or METRICS, as names of variables have it, and OTLP's protocol where none is set.
type signal struct{ name, protocol string }

// setting returns the signal's own variable of OTLP, or the one of all signals.
func (s signal) setting(name string) string {
	return cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_"+s.name+"_"+name), os.Getenv("OTEL_EXPORTER_OTLP_"+name))
}

// kind returns otlp, console, or "" if nothing is to be sent. For otlp the other variables have been checked.
func (s signal) kind() (string, error) {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") { // Go's SDK does not heed it
		return "", nil
	}
	variable := "OTEL_" + s.name + "_EXPORTER"
	switch kind := os.Getenv(variable); kind {
	case "none":
		return "", nil
	case "console":
		return kind, nil
	case "otlp":
		return kind, s.check()
	case "":
		if s.setting("ENDPOINT") == "" {
			return "", nil
		}
		return "otlp", s.check()
	}
	return "", fmt.Errorf("%s is wrong; write otlp, console or none", variable)
}

// check finds what the exporters would pass over: they would send to localhost in place of an endpoint that they cannot
// read.
func (s signal) check() error {
	both := func(name string) []string {
		return []string{"OTEL_EXPORTER_OTLP_" + s.name + "_" + name, "OTEL_EXPORTER_OTLP_" + name}
	}
	for _, variable := range both("PROTOCOL") {
		if v := os.Getenv(variable); !slices.Contains([]string{"", HTTP, GRPC}, v) {
			return fmt.Errorf("%s is wrong; write %s or %s", variable, HTTP, GRPC)
		}
	}
	byHTTP := cmp.Or(s.setting("PROTOCOL"), s.protocol) == HTTP
	for _, variable := range both("ENDPOINT") {
		v := os.Getenv(variable)
		u, err := url.Parse(v)
		if v != "" && (err != nil || byHTTP && (u.Host == "" || u.Scheme != "http" && u.Scheme != "https")) {
			return fmt.Errorf("%s is no URL; write one like http://collector:4318", variable)
		}
	}
	return nil
}
