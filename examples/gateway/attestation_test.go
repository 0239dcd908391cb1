// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
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
			require.Contains(t, g.log.String(), "corrupts KV")
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
