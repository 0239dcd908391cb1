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
	g, _, _ := startSim(t, "", "-trace", file)
	status, _, body := g.complete(`{"model":"tiny","prompt":"my secret","max_tokens":2}`, "Traceparent",
		sentTraceparent)
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
	assert.NotContains(t, string(written), "secret")

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
	g, _, _ := startSim(t, "", "-admin", "")
	g.signal()
	g.ended(exitOK)
	assert.Equal(t, "edge", c.Metrics()["pd.endpoints"].Service)
	assert.Empty(t, c.Spans())
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
	g.complete(completion)
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
	g, _, _ := startHTTP(t, "", "")
	status, _, _ := g.complete(completion)
	assert.Equal(t, http.StatusOK, status)
	g.signal()
	g.ended(exitOK)
	assert.Contains(t, g.log.String(), "connection refused")
}
