// SPDX-License-Identifier: Apache-2.0

package otlp_test

import (
	"context"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/cmd/otlp"
	"github.com/pdkit/pdkit/cmd/otlp/otlptest"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// only sets the variables of a test; those of the process that runs it are unset.
func only(t *testing.T, env map[string]string) {
	t.Helper()
	for _, name := range []string{"OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES",
		"OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT",
		"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL",
		"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_HEADERS"} {
		t.Setenv(name, env[name])
	}
	for name, value := range env {
		t.Setenv(name, value)
	}
}

// made says which of spans and metrics have an exporter.
func made(t *testing.T) (spans, metrics bool) {
	t.Helper()
	exporter, err := otlp.NewSpanExporter(t.Context(), otlp.HTTP)
	require.NoError(t, err)
	reader, err := otlp.NewMetricReader(t.Context())
	require.NoError(t, err)
	if exporter != nil {
		assert.NoError(t, exporter.Shutdown(context.Background()))
	}
	if reader != nil {
		_ = reader.Shutdown(context.Background()) // it says that no provider has it
	}
	return exporter != nil, reader != nil
}

func TestNothingIsSentUnlessAVariableSaysSo(t *testing.T) {
	const url = "http://127.0.0.1:1"
	for name, c := range map[string]struct {
		env            map[string]string
		spans, metrics bool
	}{
		"no variable":             {},
		"a service's name":        {env: map[string]string{"OTEL_SERVICE_NAME": "x"}},
		"a protocol":              {env: map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}},
		"an endpoint":             {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": url}, true, true},
		"an endpoint of spans":    {map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url}, true, false},
		"an endpoint of metrics":  {map[string]string{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": url}, false, true},
		"an exporter of spans":    {map[string]string{"OTEL_TRACES_EXPORTER": "otlp"}, true, false},
		"the console for spans":   {map[string]string{"OTEL_TRACES_EXPORTER": "console"}, true, false},
		"the console for metrics": {map[string]string{"OTEL_METRICS_EXPORTER": "console"}, false, true},
		"an endpoint, and none for metrics": {
			map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_METRICS_EXPORTER": "none"}, true, false},
		"an endpoint, and none for spans": {
			map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_TRACES_EXPORTER": "none"}, false, true},
		"all turned off": {env: map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_SDK_DISABLED": "True"}},
	} {
		t.Run(name, func(t *testing.T) {
			only(t, c.env)
			spans, metrics := made(t)
			assert.Equal(t, c.spans, spans, "spans")
			assert.Equal(t, c.metrics, metrics, "metrics")
		})
	}
}

func TestAWrongVariableIsNamedWithoutItsValue(t *testing.T) {
	const endpoint, protocol = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"
	for _, c := range []struct {
		protocol string // the default
		env      map[string]string
		want     string
	}{
		{otlp.HTTP, map[string]string{"OTEL_TRACES_EXPORTER": "s3cret"},
			"OTEL_TRACES_EXPORTER is wrong; write otlp, console or none"},
		{otlp.HTTP, map[string]string{"OTEL_TRACES_EXPORTER": "otlp,console"},
			"OTEL_TRACES_EXPORTER is wrong; write otlp, console or none"},
		{otlp.HTTP, map[string]string{endpoint: "http://127.0.0.1:1", protocol: "s3cret"},
			protocol + " is wrong; write http/protobuf or grpc"},
		{otlp.HTTP, map[string]string{endpoint: "s3cret:4318"},
			endpoint + " is no URL; write one like http://collector:4318"},
		{otlp.HTTP, map[string]string{endpoint: "http://user:s3cret@[::1"},
			endpoint + " is no URL; write one like http://collector:4318"},
		{otlp.GRPC, map[string]string{"OTEL_TRACES_EXPORTER": "otlp", endpoint: "127.0.0.1:4317"},
			endpoint + " is no URL; write one like http://collector:4318"},
		{otlp.GRPC, map[string]string{"OTEL_TRACES_EXPORTER": "otlp", protocol: "http/protobuf",
			"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "collector:4318"},
			"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is no URL; write one like http://collector:4318"},
	} {
		only(t, c.env)
		exporter, err := otlp.NewSpanExporter(t.Context(), c.protocol)
		assert.Nil(t, exporter, c.env)
		assert.EqualError(t, err, c.want, c.env)
	}
	only(t, map[string]string{"OTEL_METRICS_EXPORTER": "prometheus"})
	reader, err := otlp.NewMetricReader(t.Context())
	assert.Nil(t, reader)
	assert.EqualError(t, err, "OTEL_METRICS_EXPORTER is wrong; write otlp, console or none")
}

// gRPC's targets are more than URLs: dns:///NAME:PORT, unix:PATH, NAME:PORT.
func TestAnEndpointOfGRPCMayBeAName(t *testing.T) {
	for _, endpoint := range []string{"collector:4317", "dns:///collector:4317", "https://collector:4317"} {
		only(t, map[string]string{"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
		exporter, err := otlp.NewSpanExporter(t.Context(), otlp.GRPC)
		if assert.NoError(t, err, endpoint) {
			assert.NoError(t, exporter.Shutdown(context.Background()))
		}
	}
}

// send sends one span.
func send(t *testing.T, protocol string) {
	t.Helper()
	exporter, err := otlp.NewSpanExporter(t.Context(), protocol)
	require.NoError(t, err)
	tracers := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter),
		sdktrace.WithResource(otlp.NewResource(t.Context(), "pdkit-x")))
	_, span := tracers.Tracer("test").Start(t.Context(), "s")
	span.End()
	_ = tracers.Shutdown(context.Background())
}

func TestSpansReachTheCollector(t *testing.T) {
	c := otlptest.Start(t)
	const endpoint, protocol = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"
	for name, x := range map[string]struct {
		protocol string // the default
		env      map[string]string
		service  string
	}{
		"HTTP by default": {otlp.HTTP, map[string]string{endpoint: c.HTTP}, "pdkit-x"},
		"gRPC by default": {otlp.GRPC, map[string]string{endpoint: c.GRPC, "OTEL_TRACES_EXPORTER": "otlp"}, "pdkit-x"},
		"gRPC by a variable": {otlp.HTTP, map[string]string{endpoint: c.GRPC, protocol: "grpc",
			"OTEL_SERVICE_NAME": "grpc"}, "grpc"},
		"HTTP by a variable": {otlp.GRPC, map[string]string{endpoint: c.GRPC, protocol: "grpc",
			"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": c.HTTP + "/v1/traces",
			"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
			"OTEL_EXPORTER_OTLP_COMPRESSION":     "gzip",
			"OTEL_RESOURCE_ATTRIBUTES":           "service.name=http,zone=a"}, "http"},
	} {
		t.Run(name, func(t *testing.T) {
			c.Reset()
			only(t, x.env)
			send(t, x.protocol)
			assert.Equal(t, x.service, c.Spans()["s"].Service)
		})
	}
}

func TestMetricsReachTheCollector(t *testing.T) {
	c := otlptest.Start(t)
	only(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": c.HTTP, "OTEL_EXPORTER_OTLP_HEADERS": "x-key=k"})
	reader, err := otlp.NewMetricReader(t.Context())
	require.NoError(t, err)
	meters := sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader),
		sdkmetric.WithResource(otlp.NewResource(t.Context(), "pdkit-x")))
	n, err := meters.Meter("test").Int64Counter("n")
	require.NoError(t, err)
	n.Add(t.Context(), 1)
	require.NoError(t, meters.Shutdown(context.Background()))
	assert.Equal(t, []string{"n"}, slices.Collect(maps.Keys(c.Metrics())))
	assert.Equal(t, "pdkit-x", c.Metrics()["n"].Service)
	assert.Equal(t, "k", c.Header().Get("X-Key"))
}

// A colon in place of the equals sign is an easy mistake, and the SDK would write the key to standard error. A collector
// may repeat the key that it refuses.
func TestTheLogHasNoKeys(t *testing.T) {
	log := &sharedtest.Log{}
	otlp.LogTo(slog.New(slog.NewTextHandler(log, nil)))
	t.Cleanup(func() { otlp.LogTo(slog.New(slog.DiscardHandler)) })
	refuses := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "no such key: "+r.Header.Get("Authorization"), http.StatusUnauthorized)
	}))
	t.Cleanup(refuses.Close)
	for name, c := range map[string]struct {
		env  map[string]string
		want string
	}{
		"a header that cannot be read": {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": otlptest.Start(t).HTTP,
			"OTEL_EXPORTER_OTLP_HEADERS": "authorization: Bearer s3cret"}, `"parse headers"`},
		"a header that is wrongly escaped": {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": otlptest.Start(t).HTTP,
			"OTEL_EXPORTER_OTLP_HEADERS": "authorization=%s3cret"}, `"escape header value"`},
		"a resource that cannot be read": {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": otlptest.Start(t).HTTP,
			"OTEL_RESOURCE_ATTRIBUTES": "s3cret"}, "resource"},
		"a key that is refused": {map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": refuses.URL,
			"OTEL_EXPORTER_OTLP_HEADERS": "authorization=s3cret"}, "401 Unauthorized"},
		"a collector that is not there": {map[string]string{
			"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:s3cret@127.0.0.1:1"}, "connection refused"},
	} {
		t.Run(name, func(t *testing.T) {
			only(t, c.env)
			send(t, otlp.HTTP)
			said := log.Take()
			assert.Contains(t, said, "level=WARN msg=telemetry error=")
			assert.Contains(t, said, c.want)
			assert.NotContains(t, strings.ToLower(said), "s3c", said)
			assert.NotContains(t, said, "://", said)
		})
	}
}

func TestTextsOfErrorsAreCleaned(t *testing.T) {
	for text, want := range map[string]string{
		`traces export: failed to send to http://c:4318/v1/traces: 401 Unauthorized (body: a key)`://
		`traces export: failed to send to URL 401 Unauthorized`,
		`traces export: retry-able request failure: body: a key`: `traces export: retry-able request failure`,
		`traces export: Post "http://u:xxxxx@c:4318/v1/traces": dial tcp 127.0.0.1:1: connect: connection refused`://
		`traces export: Post "URL": dial tcp 127.0.0.1:1: connect: connection refused`,
		`traces export: rpc error: code = Unauthenticated desc = a key`://
		`traces export: rpc error: code = Unauthenticated`,
		`OTLP partial success: a key (3 spans rejected)`: `OTLP`,
	} {
		assert.Equal(t, want, otlp.Clean(text))
	}
}
