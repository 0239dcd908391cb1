// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/otlp/otlptest"
)

const sentTraceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// One request, and the program's end: what is in memory is sent then. A file of spans and the endpoint for Prometheus
// work beside it.
func TestSpansAndMetricsAreSentToACollector(t *testing.T) {
	c := otlptest.Start(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.HTTP)
	t.Setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
	file := filepath.Join(t.TempDir(), "spans.json")
	p, d := startPair(t)
	g := start(t, gatewayYAML("")+nixlYAML(p, d), "-trace", file)
	status, _, body := do(t, http.MethodPost, g.client+"/v1/completions",
		`{"model":"tiny","prompt":"hi","max_tokens":2}`, "Traceparent", sentTraceparent)
	require.Equal(t, http.StatusOK, status, body)
	g.sample(`pd_request_duration_seconds_count\{.*\}`)
	g.signal()
	g.ended(exitOK)

	spans := c.Spans()
	require.Len(t, spans, 3)
	request := spans["pd.request"]
	require.NotNil(t, request.Span)
	assert.Equal(t, "0af7651916cd43dd8448eb211c80319c", hex.EncodeToString(request.TraceId))
	assert.Equal(t, "b7ad6b7169203331", hex.EncodeToString(request.ParentSpanId), "the client's")
	for _, leg := range []string{"pd.prefill", "pd.decode"} {
		require.NotNil(t, spans[leg].Span, leg)
		assert.Equal(t, request.TraceId, spans[leg].TraceId, leg)
		assert.Equal(t, request.SpanId, spans[leg].ParentSpanId, leg)
		assert.Equal(t, "pdkit-gateway", spans[leg].Service, leg)
	}
	written, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, 3, strings.Count(string(written), "\n"), "the file has the same spans")

	metrics := c.Metrics()
	for _, name := range []string{"pd.request.duration", "pd.leg.duration", "pd.endpoints", "pd.bytes.in_flight"} {
		require.NotNil(t, metrics[name].Metric, name)
		assert.Equal(t, "pdkit-gateway", metrics[name].Service, name)
	}
	assert.EqualValues(t, 1, metrics["pd.request.duration"].GetHistogram().DataPoints[0].Count)
}

// Metrics can be sent without an address for operators.
func TestMetricsAreSentWithoutAnAdminAddress(t *testing.T) {
	c := otlptest.Start(t)
	t.Setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", c.HTTP+"/v1/metrics")
	t.Setenv("OTEL_SERVICE_NAME", "edge")
	p, d := startPair(t)
	g := start(t, gatewayYAML("")+nixlYAML(p, d), "-admin", "")
	g.signal()
	g.ended(exitOK)
	assert.Equal(t, "edge", c.Metrics()["pd.endpoints"].Service)
	assert.Empty(t, c.Spans())
}

func TestAWrongVariableOfTelemetryEndsWith1(t *testing.T) {
	t.Setenv("OTEL_TRACES_EXPORTER", "zipkin")
	p, d := newEngine(t), newEngine(t)
	log := &logBuffer{}
	assert.Equal(t, exitFailed, run([]string{"-config", write(t, gatewayYAML("")+pairYAML("m", p, d, ""))}, log, log,
		nil))
	assert.Contains(t, log.String(), "OTEL_TRACES_EXPORTER is wrong; write otlp, console or none")
}

// What was made for metrics ends, too: the test looks for goroutines that are left.
func TestAFileOfSpansThatCannotBeOpenedEndsWith1(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", otlptest.Start(t).HTTP+"/v1/metrics")
	p, d := newEngine(t), newEngine(t)
	log := &logBuffer{}
	assert.Equal(t, exitFailed, run([]string{"-config", write(t, gatewayYAML("")+pairYAML("m", p, d, "")), "-trace",
		filepath.Join(t.TempDir(), "none", "spans.json")}, log, log, nil))
	assert.Contains(t, log.String(), "trace: the file cannot be opened for writing")
}

// A collector that takes connections and never responds costs the end a bounded time, and nothing but a warning.
func TestACollectorThatHangsDoesNotHoldUpTheEnd(t *testing.T) {
	t.Parallel()
	hanging := make(chan struct{})
	collector := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-hanging }))
	t.Cleanup(func() { close(hanging); collector.Close() })
	p, d := newEngine(t), newEngine(t)
	g, cmd := startProcess(t, gatewayYAML("")+pairYAML("m", p, d, ""),
		[]string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + collector.URL})
	do(t, http.MethodPost, g.client+"/v1/completions", completion)
	begun := time.Now()
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), "exit code 0")
	assert.Less(t, time.Since(begun), lastSpans+4*time.Second)
	assert.Contains(t, g.log.String(), "msg=telemetry")
	assert.NotContains(t, g.log.String(), "://")
}

// A collector that is not there costs nothing but a warning.
func TestACollectorThatIsNotThereIsReported(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:"+unusedPort(t)+"/v1/traces")
	p, d := newEngine(t), newEngine(t)
	g := start(t, gatewayYAML("")+pairYAML("m", p, d, ""))
	status, _, _ := do(t, http.MethodPost, g.client+"/v1/completions", completion)
	assert.Equal(t, http.StatusOK, status)
	g.signal()
	g.ended(exitOK)
	assert.Contains(t, g.log.String(), "connection refused")
}
