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
			p, d := startPair(t)
			yaml := strings.Replace(nixlYAML(p, d), "{type: NixlConnector, config: {leaseDuration: 30s}}", "{type: "+
				connector+"}", 1)
			g := start(t, gatewayYAML("")+yaml, "-synthetic-probe", "20ms")
			require.Eventually(t, func() bool {
				_, _, metrics := do(t, http.MethodGet, g.admin+"/metrics", "")
				return strings.Contains(metrics, want)
			}, 20*time.Second, 20*time.Millisecond)
			_, _, metrics := do(t, http.MethodGet, g.admin+"/metrics", "")
			if connector == "http" {
				g.logs(1, "KV is not reused as it should be")
				return
			}
			require.NotContains(t, metrics, `pd_verdict="not reused"`)
			require.NotContains(t, g.log.String(), "level=WARN")
			// A check that failed has no ratio, and the last good one is no news.
			scrape(g.admin) // for docs/metrics.md
			require.NoError(t, d.Close())
			require.Eventually(t, func() bool {
				_, _, metrics := do(t, http.MethodGet, g.admin+"/metrics", "")
				return strings.Contains(metrics, `pd_verdict="error"`) && !strings.Contains(metrics, want)
			}, 20*time.Second, 20*time.Millisecond)
		})
	}
}

func TestTheSyntheticProbesPeriodIsChecked(t *testing.T) {
	_, err := parseFlags([]string{"-config", "x", "-synthetic-probe", "often"}, &strings.Builder{})
	require.Error(t, err)
	f, err := parseFlags([]string{"-config", "x", "-synthetic-probe", "-1s"}, &strings.Builder{})
	require.NoError(t, err)
	require.ErrorContains(t, f.override(&configuration{gateway: gatewaySpec{Listen: "127.0.0.1:0"}}),
		"-synthetic-probe: is negative")
}

// While the gateway drains it serves no probes, which says nothing of the engines.
func TestTheSyntheticProbeIsSilentWhileDraining(t *testing.T) {
	p, d := startPair(t)
	d.Inject(enginesim.Fault{Kind: enginesim.FaultStallStream, Path: "/v1/chat/completions", AfterChunks: 3})
	g := start(t, gatewayYAML("")+nixlYAML(p, d), "-synthetic-probe", "10ms")
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g.client+"/v1/chat/completions",
		strings.NewReader(`{"model":"tiny","messages":[{"role":"user","content":"hold on"}],"max_tokens":20,`+
			`"stream":true}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	g.signal()
	time.Sleep(300 * time.Millisecond)
	g.signal()
	g.ended(exitOK)
	require.NotContains(t, g.log.String(), "reuse")
}
