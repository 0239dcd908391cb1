// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/enginesim"
)

// Two models with the same connector are two series. One model has its name too, since a reload may add another.
func TestMetricsTellModelsApart(t *testing.T) {
	p, d := startPair(t)
	for models := 1; models <= 2; models++ {
		yaml := gatewayYAML("") + nixlYAML(p, d)
		if models == 2 {
			yaml += strings.ReplaceAll(nixlYAML(p, d), "tiny", "small")
		}
		g := start(t, yaml)
		status, _, body := do(t, http.MethodPost, g.client+"/v1/completions",
			`{"model":"tiny","prompt":"hi","max_tokens":2}`)
		require.Equal(t, http.StatusOK, status, body)
		g.sample(`pd_request_duration_seconds_count\{.*\}`) // it is counted a moment after its response
		var series []string
		_, _, metrics := do(t, http.MethodGet, g.admin+"/metrics", "")
		for line := range strings.Lines(metrics) {
			if strings.HasPrefix(line, "pd_request_duration_seconds_count{") {
				series = append(series, line)
			}
		}
		require.Len(t, series, 1)
		assert.Contains(t, series[0], `gen_ai_request_model="tiny"`)
	}
}

// sample waits until a series has a value above zero, and returns its labels.
func (p *program) sample(series string) {
	p.t.Helper()
	want := regexp.MustCompile(`(?m)^` + series + ` ([0-9.e+-]+)$`)
	var page string
	require.Eventually(p.t, func() bool {
		_, _, page = do(p.t, http.MethodGet, p.admin+"/metrics", "")
		m := want.FindStringSubmatch(page)
		return m != nil && m[len(m)-1] != "0"
	}, 20*time.Second, 10*time.Millisecond, "%s in\n%s", series, grepPD(page))
}

func grepPD(page string) string {
	var b strings.Builder
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "pd_") {
			b.WriteString(line)
		}
	}
	return b.String()
}

// What engines count of KV is shown by role. What they counted before the gateway knew them is not the gateway's.
func TestMetricsOfEngines(t *testing.T) {
	p, d := startPair(t)
	ask := func(g *program) {
		status, _, body := do(t, http.MethodPost, g.client+"/v1/completions", `{"model":"tiny","prompt":"`+
			strings.Repeat("some words ", 40)+`","max_tokens":2}`)
		require.Equal(t, http.StatusOK, status, body)
	}
	before := start(t, gatewayYAML("")+nixlYAML(p, d))
	ask(before)
	bytes := d.Stats().BytesTransferred
	require.Positive(t, bytes)
	g := start(t, gatewayYAML("")+nixlYAML(p, d), "-inspect", "100ms")
	const of = `gen_ai_request_model="tiny",pd_role="decode"`
	require.Eventually(t, func() bool {
		_, _, page := do(t, http.MethodGet, g.admin+"/metrics", "")
		return strings.Contains(page, "pd_engine_kv_bytes_total{"+of+"} 0\n")
	}, 20*time.Second, 10*time.Millisecond)
	ask(g)
	g.sample(`pd_engine_kv_bytes_total\{` + of + `\}`)
	g.sample(`pd_engine_kv_transfer_duration_seconds_total\{` + of + `\}`)
	g.sample(`pd_engine_prompt_tokens_total\{` + of + `,pd_source="taken"\}`)
	require.EventuallyWithT(t, func(c *assert.CollectT) { // the engine may have been asked while it served
		_, _, page := do(t, http.MethodGet, g.admin+"/metrics", "")
		for _, series := range []string{"pd_engine_requests_running{" + of + "} 0",
			"pd_engine_requests_waiting{" + of + "} 0",
			"pd_engine_kv_failures_total{" + of + "} 0", "pd_engine_kv_expired_total{" + of + "} 0"} {
			assert.Contains(c, page, series)
		}
	}, 20*time.Second, 10*time.Millisecond)
}

// An engine that starts again counts from zero, and the totals go on.
func TestTotalsOfEnginesOnlyRise(t *testing.T) {
	var m modelTotals
	m.roles = map[string]*roleTotal{}
	e := &discovery.Endpoint{ID: "d", Role: discovery.RoleDecode}
	load := func(bytes float64) *inspect.Load { return &inspect.Load{KV: inspect.KV{Bytes: bytes}} }
	for _, step := range []struct {
		now, old float64
		known    bool
		want     float64
	}{{100, 0, false, 0}, {130, 100, true, 30}, {130, 130, true, 30}, {5, 130, true, 35}} {
		m.add(e, load(step.now), inspect.KV{Bytes: step.old}, step.known)
		assert.InDelta(t, step.want, m.roles["decode"].counted.Bytes, 0)
	}
}

func TestAdmissionTellsHowLongRequestsWaited(t *testing.T) {
	p, d := newEngine(t, "m"), newEngine(t, "m")
	hold := make(chan struct{})
	d.set(func(e *engine) { e.hold = hold })
	g := start(t, gatewayYAML("")+pairYAML("m", p, d, "  admission: {mode: fixed, inFlightPerDecode: 1, queue: 1}\n"))
	s := openStream(t, g)
	ended := make(chan int)
	go func() {
		status, _, _ := do(t, http.MethodPost, g.client+"/v1/completions", `{"model":"m","prompt":"b"}`)
		ended <- status
	}()
	g.sample(`pd_admission_queued\{gen_ai_request_model="m"\}`)
	g.sample(`pd_requests_in_flight\{gen_ai_request_model="m",pd_phase="pick"\}`)
	close(hold)
	assert.Equal(t, "data: [DONE]", s.rest(t))
	assert.Equal(t, http.StatusOK, <-ended)
	g.sample(`pd_admission_wait_seconds_count\{gen_ai_request_model="m"\}`)
}

func TestASecondPrefillIsCounted(t *testing.T) {
	slow, fast, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = slow.Close(); _ = fast.Close() })
	p, d := startPair(t)
	slow.Inject(enginesim.Fault{Kind: enginesim.FaultStall, Leg: enginesim.LegPrefill, Count: -1})
	yaml := strings.Replace(nixlYAML(p, d), "      endpoints:\n",
		"      endpoints:\n        - {url: "+strconv.Quote(slow.URL())+", role: prefill, group: a}\n", 1)
	yaml = strings.Replace(yaml, "  kvConnector: {", "  kvConnector: {retry: {hedge: 20ms, budget: 1}, ", 1)
	g := start(t, gatewayYAML("")+yaml)
	for range 4 { // some of them are sent to the slow one first
		status, _, body := do(t, http.MethodPost, g.client+"/v1/completions",
			`{"model":"tiny","prompt":"hi","max_tokens":2}`)
		require.Equal(t, http.StatusOK, status, body)
	}
	g.sample(`pd_hedges_total\{gen_ai_request_model="tiny",pd_connector="nixl",pd_reason="won"\}`)
}

// D's refusal frees the blocks of P's that wait for it: see docs/protocols/nixl.md, recording 25.
func TestReleasedHandoffsAreCounted(t *testing.T) {
	p, d := startPair(t)
	g := start(t, gatewayYAML("")+nixlYAML(p, d))
	d.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400, Leg: enginesim.LegDecode, Count: 1})
	status, _, body := do(t, http.MethodPost, g.client+"/v1/completions",
		`{"model":"tiny","prompt":"hi","max_tokens":2}`)
	require.Equal(t, http.StatusBadRequest, status, body)
	g.sample(`pd_handoffs_released_total\{gen_ai_request_model="tiny",pd_connector="nixl"\}`)
}

// The client leaves while mooncake's P computes, and P's leg runs on.
func TestPrefillsThatRanOnAreCounted(t *testing.T) {
	t.Parallel()
	p, d, err := enginesim.Pair(enginesim.Config{Connector: "mooncake", PrefillRate: 50},
		enginesim.Config{Connector: "mooncake"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	yaml := strings.Replace(nixlYAML(p, d), "{type: NixlConnector, config: {leaseDuration: 30s}}", "{type: mooncake}",
		1)
	yaml = strings.Replace(yaml, "role: prefill", "role: prefill, attributes: {bootstrapURL: "+
		strconv.Quote(p.Bootstrap())+"}", 1)
	g := start(t, gatewayYAML("")+yaml)
	ctx, leave := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, g.client+"/v1/completions", strings.NewReader(
		`{"model":"tiny","prompt":"`+strings.Repeat("some words ", 20)+`","max_tokens":2}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	go func() {
		for p.Stats().Requests == 0 && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		leave()
	}()
	resp, err := http.DefaultClient.Do(req)
	if err == nil {
		_ = resp.Body.Close()
	}
	require.ErrorIs(t, err, context.Canceled)
	g.sample(`pd_prefills_ran_on_total\{gen_ai_request_model="tiny",pd_connector="mooncake"\}`)
}

func TestMetricsOfTheConventionsForGenerativeAI(t *testing.T) {
	p, d := startPair(t)
	g := start(t, gatewayYAML("")+nixlYAML(p, d), "-gen-ai", "vllm")
	status, _, body := do(t, http.MethodPost, g.client+"/v1/completions",
		`{"model":"tiny","prompt":"hi","max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}`)
	require.Equal(t, http.StatusOK, status, body)
	const of = `gen_ai_operation_name="text_completion",gen_ai_provider_name="vllm",gen_ai_request_model="tiny"`
	for _, name := range []string{"gen_ai_server_request_duration_seconds_count",
		"gen_ai_server_time_to_first_token_seconds_count", "gen_ai_server_time_per_output_token_seconds_count"} {
		g.sample(name + `\{` + of + `\}`)
	}
	g.sample(`gen_ai_client_inference_usage_output_tokens_total\{` + of + `,gen_ai_token_modality="unknown"\}`)
}
