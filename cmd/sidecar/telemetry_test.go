// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/cmd/internal/cmdline"
	"github.com/pdkit/pdkit/cmd/otlp/otlptest"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

var metricsLine = regexp.MustCompile(`msg=metrics listen=\S*:(\d+)`)

func (p *program) metrics(t *testing.T) string {
	t.Helper()
	m := metricsLine.FindStringSubmatch(p.log.String())
	require.NotNil(t, m, "%s", p.log)
	return "127.0.0.1:" + m[1] + "/metrics"
}

func TestMetricsAreServedAtAPortOfTheirOwn(t *testing.T) {
	p, _, x := pair(t, enginesim.Config{}, enginesim.Config{}, map[string]string{"MORIIO_METRICS_ADDR": "127.0.0.1:0"})
	for n, headers := range [][]string{{header, hostPort(t, p.URL())}, nil} {
		require.Equal(t, http.StatusOK, statusOf(complete(t, x.addr, n, false, headers...)))
	}
	for _, part := range []string{`pd_request_duration_seconds_count{pd_connector="nixl",pd_mode="disaggregated"} 1`,
		`pd_request_duration_seconds_count{pd_connector="nixl",pd_mode="aggregated",pd_reason="no_header"} 1`,
		`pd_attempts_total{pd_connector="nixl",pd_mode="aggregated",pd_reason="no_header"} 1`, "go_goroutines"} {
		require.Eventually(t, func() bool { // a request is counted a moment after its response
			status, _, response := fetch(t, x.metrics(t))
			return status == http.StatusOK && strings.Contains(response, part)
		}, 20*time.Second, 10*time.Millisecond, part)
	}
	_, _, engines := fetch(t, x.addr+"/metrics")
	assert.Contains(t, engines, "vllm:", "the sidecar's port shows the engine's")
	assert.NotContains(t, engines, "pd_request_duration")
}

func TestMetricsCanBeServedOverTLS(t *testing.T) {
	folder := t.TempDir()
	writeCertificate(t, folder)
	port := ports(t, 1)
	_, _, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil, "--metrics-cert-dir="+folder, "--metrics-port="+
		strconv.Itoa(port))
	// it is self-signed
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	status, _, response := ask(t, client, http.MethodGet, "https://"+x.metrics(t), "")
	assert.Equal(t, http.StatusOK, status)
	assert.Contains(t, response, "go_goroutines")
}

func TestWithoutAPortThereAreNoMetrics(t *testing.T) {
	_, _, x := pair(t, enginesim.Config{}, enginesim.Config{}, nil, "--metrics-port=0")
	assert.NotContains(t, x.log.String(), "msg=metrics")
}

// setenv sets variables that the exporters read, too, and returns them.
func setenv(t *testing.T, env map[string]string) map[string]string {
	t.Helper()
	for name, value := range env {
		t.Setenv(name, value)
	}
	return env
}

// The console is also llm-d's exporter, unless OTEL_TRACES_EXPORTER names another.
func TestSpansAreWritten(t *testing.T) {
	for share, want := range map[string]int{"1": 1, "0": 0} {
		p, _, x := pair(t, enginesim.Config{}, enginesim.Config{}, setenv(t, map[string]string{
			"OTEL_TRACES_SAMPLER_ARG": share, "OTEL_SERVICE_NAME": "routing-proxy"}), "--tracing")
		require.Equal(t, http.StatusOK, statusOf(complete(t, x.addr, 0, false, header, hostPort(t, p.URL()))))
		require.Equal(t, exitOK, x.stop(), "what is in memory is written at the end")
		n := 0
		for line := range strings.Lines(x.log.String()) {
			if gjson.Get(line, "Name").String() == "pd.prefill" {
				n++
				assert.Equal(t, "routing-proxy",
					gjson.Get(line, `Resource.#(Key=="service.name").Value.Value`).String())
			}
		}
		assert.Equal(t, want, n, "share %s", share)
	}
}

// These are variables of llm-d's charts: they name no protocol, since llm-d's sidecar knows only gRPC.
func TestSpansAreSentToACollector(t *testing.T) {
	for name, c := range map[string]struct {
		url  func(*otlptest.Collector) string
		env  map[string]string
		want string // the service's name
	}{
		"over gRPC": {func(c *otlptest.Collector) string { return c.GRPC }, map[string]string{}, "pdkit-sidecar"},
		"over HTTP": {func(c *otlptest.Collector) string { return c.HTTP }, map[string]string{
			"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "routing-proxy"}, "routing-proxy"},
	} {
		t.Run(name, func(t *testing.T) {
			collector := otlptest.Start(t)
			c.env["OTEL_TRACES_EXPORTER"], c.env["OTEL_TRACES_SAMPLER_ARG"] = "otlp", "1"
			c.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = c.url(collector)
			p, _, x := pair(t, enginesim.Config{}, enginesim.Config{}, setenv(t, c.env), "--tracing")
			require.Equal(t, http.StatusOK, statusOf(complete(t, x.addr, 0, false, header, hostPort(t, p.URL()))))
			require.Equal(t, exitOK, x.stop(), "what is in memory is sent at the end")
			spans := collector.Spans()
			request := spans["pd.request"]
			require.NotNil(t, request.Span)
			for _, leg := range []string{"pd.prefill", "pd.decode"} {
				require.NotNil(t, spans[leg].Span, leg)
				assert.Equal(t, request.SpanId, spans[leg].ParentSpanId, leg)
				assert.Equal(t, c.want, spans[leg].Service, leg)
			}
			assert.NotContains(t, x.log.String(), "pd.prefill", "they are not in the log as well")
			assert.Empty(t, collector.Metrics(), "llm-d's sidecar sends none")
		})
	}
}

// Without --tracing the variables do nothing, as in llm-d: an endpoint in all pods of a cluster is no wish for spans.
func TestNoSpansAreMadeWithoutTheFlag(t *testing.T) {
	c := otlptest.Start(t)
	p, _, x := pair(t, enginesim.Config{}, enginesim.Config{}, setenv(t, map[string]string{
		"OTEL_TRACES_EXPORTER": "otlp", "OTEL_TRACES_SAMPLER_ARG": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": c.GRPC}))
	require.Equal(t, http.StatusOK, statusOf(complete(t, x.addr, 0, false, header, hostPort(t, p.URL()))))
	require.Equal(t, exitOK, x.stop())
	assert.Empty(t, c.Spans())
}

func TestAnEndpointThatIsNoURLEndsWith1(t *testing.T) {
	env := setenv(t, map[string]string{"OTEL_TRACES_EXPORTER": "otlp",
		"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:s3cret@[::1"})
	var said sharedtest.Log
	assert.Equal(t, exitFailed, run(t.Context(), []string{"--port=0", "--prefillers=p:1", "--tracing"},
		func(name string) string { return env[name] }, io.Discard, &said))
	assert.Contains(t, said.String(), "--tracing: OTEL_EXPORTER_OTLP_ENDPOINT is no URL")
	assert.NotContains(t, said.String(), "s3cret")
}

// A request's trace context reaches both engines, whether the sidecar makes spans or not.
func TestATraceGoesOnToTheEngines(t *testing.T) {
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for name, args := range map[string][]string{"without spans": nil,
		"with an exporter that is not known": {"--tracing"}} {
		p, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"},
			args...)
		require.Equal(t, http.StatusOK,
			statusOf(complete(t, x.addr, 0, false, header, hostPort(t, p.URL()), "traceparent", trace)))
		for _, r := range append(p.Requests(), d.Requests()...) {
			assert.Contains(t, r.Header.Get("Traceparent"), "0af7651916cd43dd8448eb211c80319c", name)
		}
		assert.Equal(t, len(args) > 0, strings.Contains(x.log.String(), "spans are not sent"), name)
	}
}

func TestTheLogCanBeJSON(t *testing.T) {
	var said sharedtest.Log
	assert.Equal(t, exitFailed, run(t.Context(), []string{"--port=0", "--prefillers=p:1", "--cert-path=" +
		t.TempDir(), "--zap-encoder=json"}, noEnv, io.Discard, &said))
	first, last, _ := strings.Cut(said.String(), "\n")
	assert.Equal(t, cmdline.Version(), gjson.Get(first, "version").String(), "the first line tells the version")
	assert.Equal(t, "cannot serve", gjson.Get(last, "msg").String(), last)
}
