// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// prompt is a completion of so many tokens, as the gateway estimates them.
func prompt(tokens int) string {
	return fmt.Sprintf(`{"model":"m","prompt":%q}`, strings.Repeat("word", tokens-1))
}

func TestAShortPromptIsNotSplit(t *testing.T) {
	g, p, d := startHTTP(t, "", "  decision: {mode: threshold, minPromptTokens: 100}\n")
	status, header, body := g.complete(prompt(50))
	require.Equal(t, http.StatusOK, status, body)
	assert.Equal(t, "aggregated", header.Get("X-PD-Mode"))
	assert.Zero(t, p.count())
	status, header, body = g.complete(prompt(150))
	require.Equal(t, http.StatusOK, status, body)
	assert.Equal(t, "disaggregated", header.Get("X-PD-Mode"))
	assert.Equal(t, 1, p.count())
	assert.Equal(t, 2, d.count())
	g.shows(`pd_decisions_total{gen_ai_request_model="m",pd_action="decode_alone",pd_dry_run="false",` +
		`pd_reason="short"} 1`)
	g.shows(`pd_decisions_total{gen_ai_request_model="m",pd_action="undecided",pd_dry_run="false",pd_reason=""} 1`)
	g.shows(`pd_decision_doubtful{gen_ai_request_model="m"} 0`)
	g.shows(`pd_attempts_total{gen_ai_request_model="m",pd_connector="http",pd_mode="aggregated",pd_reason="short"} 1`)
}

func TestADryRunSplitsEachRequestAndCounts(t *testing.T) {
	g, p, _ := startHTTP(t, "", "  decision: {mode: never, dryRun: true}\n")
	for range 3 {
		status, header, body := g.complete(prompt(50))
		require.Equal(t, http.StatusOK, status, body)
		assert.Equal(t, "disaggregated", header.Get("X-PD-Mode"))
	}
	assert.Equal(t, 3, p.count())
	g.shows(`pd_decisions_total{gen_ai_request_model="m",pd_action="decode_alone",pd_dry_run="true",` +
		`pd_reason="policy"} 3`)
}

func TestADryRunChangesNoByteOfALeg(t *testing.T) {
	for _, body := range []string{prompt(50), `{"model":"m","stream":true,"prompt":"hi"}`} {
		var legs []seen
		for _, spec := range []string{"", "  decision: {mode: never, dryRun: true}\n",
			"  decision: {mode: predicted, dryRun: true}\n",
			"  decision: {mode: threshold, minPromptTokens: 1000, dryRun: true}\n"} {
			g, p, d := startHTTP(t, "", spec)
			status, _, text := g.complete(body, "X-Request-Id", "same")
			require.Equal(t, http.StatusOK, status, text)
			now := []seen{p.last(), d.last()}
			for _, leg := range now {
				leg.header.Del("Content-Length")
			}
			if legs == nil {
				legs = now
			}
			assert.Equal(t, legs, now, spec)
		}
	}
}

func TestPredictionsAreComparedWithStreams(t *testing.T) {
	g, _, _ := startHTTP(t, "", "  decision: {mode: predicted, objectives: {ttft: 1s}}\n")
	for range 12 {
		g.stream("/v1/completions", `{"model":"m","stream":true,"prompt":"`+strings.Repeat("word", 99)+`"}`).rest(t)
	}
	g.sample(`pd_decision_error_ratio\{gen_ai_request_model="m",pd_objective="ttft"\}`)
}

func TestCheckSaysWhatIsDecided(t *testing.T) {
	p, d := entry("http://127.0.0.1:8100", "prefill", nil), entry("http://127.0.0.1:8200", "decode", nil)
	for spec, want := range map[string]string{
		"": "",
		"  decision: {mode: threshold, minPromptTokens: 256, uncachedTokens: 512}\n": "threshold, prompts below 256 " +
			"tokens stay at decode, and those with fewer than 512 that are not cached",
		"  decision: {mode: predicted, objectives: {ttft: 1s}, dryRun: true}\n": "predicted, TTFT of 1s, ITL of " +
			"100ms, counted only",
		"  decision: {mode: predicted}\n  admission: {mode: adaptive}\n": "predicted, TTFT of 2s, ITL of 100ms, " +
			"may refuse",
	} {
		code, out, errs := check(t, "-config", write(t, serverYAML("m", spec, p, d)))
		require.Equal(t, exitOK, code, errs)
		if want == "" {
			assert.NotContains(t, out, "decision")
			continue
		}
		assert.Regexp(t, `decision +`+want+"\n", out)
	}
}

// A model that begins to decide, or ends it, loses no request.
func TestAReloadChangesWhatIsDecided(t *testing.T) {
	g, p, d := startHTTP(t, "", "")
	mode := func() string {
		status, header, body := g.complete(prompt(50))
		require.Equal(t, http.StatusOK, status, body)
		return header.Get("X-PD-Mode")
	}
	assert.Equal(t, "disaggregated", mode())
	for spec, want := range map[string]string{"  decision: {mode: never}\n": "aggregated",
		"  decision: {mode: never}\n  admission: {mode: adaptive}\n":                          "aggregated",
		"  decision: {mode: threshold, minPromptTokens: 10}\n  admission: {mode: adaptive}\n": "disaggregated"} {
		require.NoError(t, os.WriteFile(g.file, []byte(gatewayYAML("")+pairYAML("m", p, d, spec)), 0o600))
		eventually(t, func() bool { return mode() == want }, spec)
	}
}
