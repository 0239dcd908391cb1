// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/pdflow/enginesim"
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
		status, _, _ := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/completions",
			completion(n, false), headers...)
		require.Equal(t, http.StatusOK, status)
	}
	status, _, response := ask(t, http.DefaultClient, http.MethodGet, "http://"+x.metrics(t), "")
	require.Equal(t, http.StatusOK, status)
	for _, part := range []string{`pd_request_duration_seconds_count{pd_connector="nixl",pd_mode="disaggregated"} 1`,
		`pd_mode="aggregated"} 1`, "go_goroutines"} {
		assert.Contains(t, response, part)
	}
	_, _, engines := ask(t, http.DefaultClient, http.MethodGet, "http://"+x.addr+"/metrics", "")
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

// The console is also llm-d's exporter, unless OTEL_TRACES_EXPORTER names another.
func TestSpansAreWritten(t *testing.T) {
	for share, want := range map[string]int{"1": 1, "0": 0} {
		p, _, x := pair(t, enginesim.Config{}, enginesim.Config{},
			map[string]string{"OTEL_TRACES_SAMPLER_ARG": share, "OTEL_SERVICE_NAME": "routing-proxy"}, "--tracing")
		status, _, _ := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/completions",
			completion(0, false), header, hostPort(t, p.URL()))
		require.Equal(t, http.StatusOK, status)
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

// A request's trace context reaches both engines, whether the sidecar makes spans or not.
func TestATraceGoesOnToTheEngines(t *testing.T) {
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for name, args := range map[string][]string{"without spans": nil,
		"with an exporter that is not here": {"--tracing"}} {
		p, d, x := pair(t, enginesim.Config{}, enginesim.Config{}, map[string]string{"OTEL_TRACES_EXPORTER": "otlp"},
			args...)
		status, _, _ := ask(t, http.DefaultClient, http.MethodPost, "http://"+x.addr+"/v1/completions",
			completion(0, false), header, hostPort(t, p.URL()), "traceparent", trace)
		require.Equal(t, http.StatusOK, status)
		for _, r := range append(p.Requests(), d.Requests()...) {
			assert.Contains(t, r.Header.Get("Traceparent"), "0af7651916cd43dd8448eb211c80319c", name)
		}
		assert.Equal(t, len(args) > 0, strings.Contains(x.log.String(), "spans are not sent"), name)
	}
}

func TestTheLogCanBeJSON(t *testing.T) {
	var said logBuffer
	assert.Equal(t, exitFailed, run(t.Context(), []string{"--port=0", "--prefillers=p:1", "--cert-path=" +
		t.TempDir(), "--zap-encoder=json"}, noEnv, &said))
	assert.Equal(t, "cannot serve", gjson.Get(said.String(), "msg").String(), said.String())
}
