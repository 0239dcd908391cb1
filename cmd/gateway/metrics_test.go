// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// Two models with the same connector are two series. One model has its name too, since a reload may add another.
func TestMetricsTellModelsApart(t *testing.T) {
	p, d := startPair(t)
	for models := 1; models <= 2; models++ {
		yaml := gatewayYAML("") + simYAML("", p, d)
		if models == 2 {
			yaml += strings.ReplaceAll(simYAML("", p, d), "tiny", "small")
		}
		g := start(t, yaml)
		status, _, body := g.complete(`{"model":"tiny","prompt":"hi","max_tokens":2}`)
		require.Equal(t, http.StatusOK, status, body)
		g.sample(`pd_request_duration_seconds_count\{.*\}`) // it is counted a moment after its response
		var series []string
		metrics := g.page("/metrics")
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
	eventually(p.t, func() bool {
		page = p.page("/metrics")
		m := want.FindStringSubmatch(page)
		return m != nil && m[len(m)-1] != "0"
	}, "%s in\n%s", series, grepPD(page))
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
		status, _, body := g.complete(`{"model":"tiny","prompt":"` +
			strings.Repeat("some words ", 40) + `","max_tokens":2}`)
		require.Equal(t, http.StatusOK, status, body)
	}
	before := start(t, gatewayYAML("")+simYAML("", p, d))
	ask(before)
	bytes := d.Stats().BytesTransferred
	require.Positive(t, bytes)
	g := start(t, gatewayYAML("")+simYAML("", p, d), "-inspect", "100ms")
	const of = `gen_ai_request_model="tiny",pd_role="decode"`
	eventually(t, func() bool {
		page := g.page("/metrics")
		return strings.Contains(page, "pd_engine_kv_bytes_total{"+of+"} 0\n")
	})
	ask(g)
	g.sample(`pd_engine_kv_bytes_total\{` + of + `\}`)
	g.sample(`pd_engine_kv_transfer_duration_seconds_total\{` + of + `\}`)
	g.sample(`pd_engine_prompt_tokens_total\{` + of + `,pd_source="taken"\}`)
	g.sample(`pd_capacity_tokens_per_second\{` + of + `\}`)
	require.EventuallyWithT(t, func(c *assert.CollectT) { // the engine may have been asked while it served
		page := g.page("/metrics")
		for _, series := range []string{"pd_engine_requests_running{" + of + "} 0",
			"pd_engine_requests_waiting{" + of + "} 0",
			"pd_capacity_backlog{" + of + "} 0", "pd_capacity_saturation_ratio{" + of + "} 0",
			"pd_capacity_engines_wanted{" + of + "} 1",
			"pd_engine_kv_failures_total{" + of + "} 0", "pd_engine_kv_expired_total{" + of + "} 0"} {
			assert.Contains(c, page, series)
		}
	}, 20*time.Second, 10*time.Millisecond)
}

func TestAdmissionTellsHowLongRequestsWaited(t *testing.T) {
	g, _, d := startHTTP(t, "", "  admission: {mode: fixed, inFlightPerDecode: 1, queue: 1}\n")
	hold := d.holds()
	s := openStream(t, g)
	ended := make(chan int)
	go func() {
		status, _, _ := g.complete(`{"model":"m","prompt":"b"}`)
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
	slow, _ := startPair(t)
	p, d := startPair(t)
	slow.Inject(enginesim.Fault{Kind: enginesim.FaultStall, Leg: enginesim.LegPrefill, Count: -1})
	g := start(t, gatewayYAML("")+
		simYAML("  kvConnector: {type: nixl, retry: {hedge: 20ms, budget: 1}}\n", slow, nil, p, d))
	for range 4 { // some of them are sent to the slow one first
		status, _, body := g.complete(`{"model":"tiny","prompt":"hi","max_tokens":2}`)
		require.Equal(t, http.StatusOK, status, body)
	}
	g.sample(`pd_hedges_total\{gen_ai_request_model="tiny",pd_connector="nixl",pd_reason="won"\}`)
}

// D's refusal frees the blocks of P's that wait for it: see docs/protocols/nixl.md, recording 25.
func TestReleasedHandoffsAreCounted(t *testing.T) {
	g, _, d := startSim(t, "")
	d.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400, Leg: enginesim.LegDecode, Count: 1})
	status, _, body := g.complete(`{"model":"tiny","prompt":"hi","max_tokens":2}`)
	require.Equal(t, http.StatusBadRequest, status, body)
	g.sample(`pd_handoffs_released_total\{gen_ai_request_model="tiny",pd_connector="nixl"\}`)
}

// The client leaves while mooncake's P computes, and P's leg runs on.
func TestPrefillsThatRanOnAreCounted(t *testing.T) {
	t.Parallel()
	p, d := simPair(t, enginesim.Config{Connector: "mooncake", PrefillRate: 50},
		enginesim.Config{Connector: "mooncake"})
	g := start(t, gatewayYAML("")+serverYAML("tiny", "  kvConnector: {type: mooncake}\n",
		entry(p.URL(), "prefill", attributes{"bootstrapURL": p.Bootstrap()}), entry(d.URL(), "decode", nil)))
	ctx, leave := context.WithCancel(t.Context())
	go func() {
		for p.Stats().Requests == 0 && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		leave()
	}()
	liveRequest(ctx, g, `{"model":"tiny","prompt":"`+strings.Repeat("some words ", 20)+`","max_tokens":2}`)
	g.sample(`pd_prefills_ran_on_total\{gen_ai_request_model="tiny",pd_connector="mooncake"\}`)
}

func TestMetricsOfTheConventionsForGenerativeAI(t *testing.T) {
	g, _, _ := startSim(t, "", "-gen-ai", "vllm")
	status, _, body := g.complete(
		`{"model":"tiny","prompt":"hi","max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}`)
	require.Equal(t, http.StatusOK, status, body)
	const of = `gen_ai_operation_name="text_completion",gen_ai_provider_name="vllm",gen_ai_request_model="tiny"`
	for _, name := range []string{"gen_ai_server_request_duration_seconds_count",
		"gen_ai_server_time_to_first_token_seconds_count", "gen_ai_server_time_per_output_token_seconds_count"} {
		g.sample(name + `\{` + of + `\}`)
	}
	g.sample(`gen_ai_client_inference_usage_output_tokens_total\{` + of + `,gen_ai_token_modality="unknown"\}`)
}
