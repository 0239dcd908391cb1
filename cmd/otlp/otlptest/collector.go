// SPDX-License-Identifier: Apache-2.0

// Package otlptest is a collector for tests: it receives OTLP over HTTP and over gRPC.
package otlptest

import (
	"compress/gzip"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	collectormetrics "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	collectortrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	metrics "go.opentelemetry.io/proto/otlp/metrics/v1"
	resource "go.opentelemetry.io/proto/otlp/resource/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// Span is a span and the service that sent it.
type Span struct {
	*trace.Span
	Service string
}

// Metric is a metric and the service that sent it.
type Metric struct {
	*metrics.Metric
	Service string
}

// Collector keeps what it receives. Its methods may be called concurrently.
type Collector struct {
	HTTP string // its URL for OTLP over HTTP
	GRPC string // its URL for OTLP over gRPC, without TLS

	mu      sync.Mutex
	spans   []Span
	metrics []Metric
	header  http.Header
}

// Start starts a collector on loopback. It is closed with the test.
func Start(t testing.TB) *Collector {
	t.Helper()
	c := &Collector{}
	byHTTP := httptest.NewServer(c)
	t.Cleanup(byHTTP.Close)
	c.HTTP = byHTTP.URL

	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c.GRPC = "http://" + ln.Addr().String()
	byGRPC := grpc.NewServer()
	collectortrace.RegisterTraceServiceServer(byGRPC, traces{c: c})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = byGRPC.Serve(ln) // its error says that it was stopped
	}()
	t.Cleanup(func() { byGRPC.Stop(); <-ended })
	return c
}

// Spans returns the spans that have come, by name. A later one replaces an earlier one of its name.
func (c *Collector) Spans() map[string]Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	byName := map[string]Span{}
	for _, s := range c.spans {
		byName[s.Name] = s
	}
	return byName
}

// Reset forgets what has come.
func (c *Collector) Reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.spans, c.metrics, c.header = nil, nil, nil
}

// Metrics returns the last state of each metric, by name.
func (c *Collector) Metrics() map[string]Metric {
	c.mu.Lock()
	defer c.mu.Unlock()
	byName := map[string]Metric{}
	for _, m := range c.metrics {
		byName[m.Name] = m
	}
	return byName
}

// Header returns that of the last request over HTTP.
func (c *Collector) Header() http.Header {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.header
}

// ServeHTTP receives OTLP over HTTP, as protobuf.
func (c *Collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		var err error
		if body, err = gzip.NewReader(body); err != nil {
			http.Error(w, "gzip", http.StatusBadRequest)
			return
		}
	}
	data, err := io.ReadAll(body)
	if err != nil {
		http.Error(w, "body", http.StatusBadRequest)
		return
	}
	var spans collectortrace.ExportTraceServiceRequest
	var measured collectormetrics.ExportMetricsServiceRequest
	switch r.URL.Path {
	case "/v1/traces":
		err = proto.Unmarshal(data, &spans)
	case "/v1/metrics":
		err = proto.Unmarshal(data, &measured)
	default:
		http.NotFound(w, r)
		return
	}
	if err != nil {
		http.Error(w, "protobuf", http.StatusBadRequest)
		return
	}
	c.take(&spans, &measured)
	c.mu.Lock()
	c.header = r.Header.Clone()
	c.mu.Unlock()
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func (c *Collector) take(spans *collectortrace.ExportTraceServiceRequest,
	measured *collectormetrics.ExportMetricsServiceRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range spans.GetResourceSpans() {
		for _, scope := range r.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				c.spans = append(c.spans, Span{s, service(r.GetResource())})
			}
		}
	}
	for _, r := range measured.GetResourceMetrics() {
		for _, scope := range r.GetScopeMetrics() {
			for _, m := range scope.GetMetrics() {
				c.metrics = append(c.metrics, Metric{m, service(r.GetResource())})
			}
		}
	}
}

func service(r *resource.Resource) string {
	for _, a := range r.GetAttributes() {
		if a.GetKey() == "service.name" {
			return a.GetValue().GetStringValue()
		}
	}
	return ""
}

// traces receives spans over gRPC.
type traces struct {
	collectortrace.UnimplementedTraceServiceServer
	c *Collector
}

// Export is the one method of OTLP's service.
func (t traces) Export(_ context.Context, r *collectortrace.ExportTraceServiceRequest) (
	*collectortrace.ExportTraceServiceResponse, error) {
	t.c.take(r, nil)
	return &collectortrace.ExportTraceServiceResponse{}, nil
}
