// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

func TestTheSyntheticProbeTellsWhetherKVIsReused(t *testing.T) {
	for connector, want := range map[string]string{"NixlConnector": `pd_reuse_ratio{`,
		"http": `pd_verdict="not reused"`} {
		t.Run(connector, func(t *testing.T) {
			g, _, d := startSim(t, "  kvConnector: {type: "+connector+"}\n", "-synthetic-probe", "20ms")
			g.shows(want)
			if connector == "http" {
				g.logs(1, "KV is not reused as it should be")
				return
			}
			require.NotContains(t, g.page("/metrics"), `pd_verdict="not reused"`)
			require.NotContains(t, g.log.String(), "level=WARN")
			// A check that failed has no ratio, and the last good one is no news.
			scrape(g.admin) // for docs/metrics.md
			require.NoError(t, d.Close())
			eventually(t, func() bool {
				metrics := g.page("/metrics")
				return strings.Contains(metrics, `pd_verdict="error"`) && !strings.Contains(metrics, want)
			})
		})
	}
}

// A decision to keep prompts at decode is about clients' requests: a probe that it kept there would look like lost KV.
func TestASyntheticProbeIsSplitWhateverIsDecided(t *testing.T) {
	t.Parallel()
	for _, decision := range []string{"never", "predicted", "threshold, minPromptTokens: 100000"} {
		t.Run(decision, func(t *testing.T) {
			t.Parallel()
			g, _, _ := startSim(t, "  decision: {mode: "+decision+"}\n", "-synthetic-probe", "20ms")
			for n := range 4 {
				eventually(t, func() bool { return sum(g.page("/metrics"), "pd_reuse_checks_total") > n })
			}
			page := g.page("/metrics")
			require.Equal(t, sum(page, "pd_reuse_checks_total"), sum(page, "pd_reuse_checks_total",
				`pd_verdict="reused"`), grepPD(page))
			require.NotContains(t, g.log.String(), "level=WARN")
		})
	}
}

// While the gateway drains it serves no probes, which says nothing of the engines.
func TestTheSyntheticProbeIsSilentWhileDraining(t *testing.T) {
	p, d := startPair(t)
	d.Inject(enginesim.Fault{Kind: enginesim.FaultStallStream, Path: "/v1/chat/completions", AfterChunks: 3})
	g := start(t, gatewayYAML("")+simYAML("", p, d), "-synthetic-probe", "10ms")
	s := g.stream("/v1/chat/completions",
		`{"model":"tiny","messages":[{"role":"user","content":"hold on"}],"max_tokens":20,"stream":true}`)
	require.Equal(t, http.StatusOK, s.resp.StatusCode)
	g.signal()
	time.Sleep(300 * time.Millisecond)
	g.signal()
	g.ended(exitOK)
	require.NotContains(t, g.log.String(), "reuse")
}
