// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// A decode engine flips bits of all KV that it gets. The gateway names it, tells it, and sends requests elsewhere.
func TestAnEngineThatCorruptsKVIsQuarantined(t *testing.T) {
	for mode, quarantined := range map[string]bool{"report": false, "quarantine": true} {
		t.Run(mode, func(t *testing.T) {
			p1, d1 := startPair(t)
			p2, d2 := startPair(t)
			yaml := strings.Replace(nixlYAML(p1, d1), "  discovery:", fmt.Sprintf(
				"  attestation: {mode: %s, every: 1ms}\n  discovery:", mode), 1)
			yaml = strings.Replace(yaml, "\n---\n", fmt.Sprintf("\n        - {url: %q, role: prefill, group: a}"+
				"\n        - {url: %q, role: decode, group: a}\n---\n", p2.URL(), d2.URL()), 1)
			d2.Inject(enginesim.Fault{Kind: enginesim.FaultCorruptKV, Leg: enginesim.LegDecode, Count: -1})
			g := start(t, gatewayYAML("")+yaml)
			name := strings.TrimPrefix(d2.URL(), "http://")
			require.Eventually(t, func() bool {
				_, _, metrics := do(t, http.MethodGet, g.admin+"/metrics", "")
				return strings.Contains(metrics, "pd_attest_named{") &&
					strings.Contains(metrics, fmt.Sprintf(`pd_decode=%q`, name))
			}, 20*time.Second, 50*time.Millisecond)
			g.logs(1, "corrupts KV") // after the quarantine
			wrong := 0
			for i := range 12 {
				body := fmt.Sprintf(`{"model":"tiny","prompt":"%d is asked","max_tokens":8}`, i)
				status, _, got := do(t, http.MethodPost, g.client+"/v1/completions", body)
				require.Equal(t, http.StatusOK, status)
				_, _, alone := do(t, http.MethodPost, d1.URL()+"/v1/completions", body)
				if text(t, got) != text(t, alone) {
					wrong++
				}
			}
			require.Equal(t, quarantined, wrong == 0, "%d of 12 responses were wrong", wrong)
		})
	}
}

// A reload replaces the prober, and with a new connect timeout the pool, too. The quarantine holds all the while, until
// attestation is turned off.
func TestAQuarantineHoldsOverReloads(t *testing.T) {
	t.Parallel()
	p1, d1 := startPair(t)
	p2, d2 := startPair(t)
	config := func(mode, connect string) string {
		yaml := strings.Replace(nixlYAML(p1, d1), "  discovery:", fmt.Sprintf(
			"  attestation: {mode: %s, every: 1ms}\n  discovery:", mode), 1)
		yaml = strings.Replace(yaml, "config: {", "timeouts: {connect: "+connect+", healthCheck: 30s}, config: {", 1)
		return gatewayYAML("") + strings.Replace(yaml, "\n---\n", fmt.Sprintf(
			"\n        - {url: %q, role: prefill, group: a}\n        - {url: %q, role: decode, group: a}\n---\n",
			p2.URL(), d2.URL()), 1)
	}
	d2.Inject(enginesim.Fault{Kind: enginesim.FaultCorruptKV, Leg: enginesim.LegDecode, Count: -1})
	g := start(t, config("quarantine", "30s"))
	g.logs(1, "corrupts KV")
	var asked, wrong atomic.Int64
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for c := range 4 {
		clients.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				body := fmt.Sprintf(`{"model":"tiny","prompt":"%d of %d is asked","max_tokens":8}`, i, c)
				status, _, got := do(t, http.MethodPost, g.client+"/v1/completions", body)
				_, _, alone := do(t, http.MethodPost, d1.URL()+"/v1/completions", body)
				asked.Add(1)
				if status != http.StatusOK || text(t, got) != text(t, alone) {
					wrong.Add(1)
				}
			}
		})
	}
	for i := range 8 {
		g.configure(config("quarantine", []string{"31s", "31s", "30s"}[i%3])) // a new pool, and the same
		g.signals <- syscall.SIGHUP
		g.logs(i+1, reloadedLine)
		before := asked.Load()
		require.Eventually(t, func() bool { return asked.Load() > before+20 }, time.Minute, time.Millisecond)
	}
	require.Zero(t, wrong.Load(), "of %d", asked.Load())
	g.configure(config("off", "30s"))
	g.signals <- syscall.SIGHUP
	require.Eventually(t, func() bool { return wrong.Load() > 0 }, time.Minute, time.Millisecond)
	close(stop)
	clients.Wait()
}
