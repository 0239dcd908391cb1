// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// withPeers returns a report with two peers: one that answers right and is dearer, and one that has faults.
func withPeers() *report {
	r := measured(1)
	r.peers = []peer{{name: "right", version: "1.0"}, {name: "faulty", version: "2.0"}}
	right := func(ratios ...float64) rival {
		return rival{ratios: ratios, series: series{name: "right 1.0", asked: 5000, slices: r.compared[0].base.slices}}
	}
	wrong := rival{ratios: []float64{2}, series: series{name: "faulty 2.0", asked: 1000, failed: 3,
		reason: "client: status 500", slices: r.compared[0].base.slices}}
	dead := rival{series: series{name: "faulty 2.0", why: "does not start:\nexit | status 1"}}
	stream, endpoints := r.compared[0], r.compared[0]
	stream.scenario, stream.peers = scenarios[6], []rival{right(24, 30, 25), dead}
	endpoints.scenario, endpoints.peers = fleetScenario(1024), []rival{right(1.5), dead}
	r.compared[0].peers = []rival{right(3, 2, 2.5), wrong}
	r.compared = append(r.compared, stream)
	r.endpoints = []compared{endpoints}
	r.footprints = append(r.footprints,
		footprint{name: "right 1.0", atRest: []float64{30 << 20}, perStream: []float64{90 << 10},
			started: []time.Duration{time.Second}},
		footprint{name: "faulty 2.0", why: "only 900 of 1000 streams are open"})
	half := stream
	half.scenario = halfLoad
	half.scenario.rate = 1000.0 / 16
	r.half = &half
	return r
}

func written(t *testing.T, r *report) string {
	t.Helper()
	var text strings.Builder
	require.NoError(t, r.write(&text))
	return text.String()
}

func TestEachPeerHasAColumn(t *testing.T) {
	text := written(t, withPeers())
	assert.Contains(t, text, "Peers: right 1.0 and faulty 2.0.")
	assert.Contains(t, text, "| ratio | target |  | right 1.0 | faulty 2.0 |")
	assert.Contains(t, text, "| **missed** | **2.500** (2.000 to 3.000) | **2.000** (2.000 to 2.000); "+
		"wrong: 3 of 1,000 (client: status 500) |")
	assert.Contains(t, text, "| **25.000** (24.000 to 30.000) | – does not start: exit / status 1 |")
	assert.Contains(t, text, "| 90.0 (90.0 to 90.0) | – only 900 of 1000 streams are open | 45 |")
	assert.Contains(t, text, "| 1000.0 (1000.0; 1) | – | 50 |")
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "| load | gateway | minimal | ratio") {
			assert.Equal(t, 11, strings.Count(line, "|"))
		}
	}
}

func TestTheClosingTextIsMadeFromTheFigures(t *testing.T) {
	text := written(t, withPeers())
	_, closing, found := strings.Cut(text, "## What this shows")
	require.True(t, found)
	for _, line := range []string{
		"- The gateway meets 3 of 5 targets. Missed: 2 KB, 16 clients (1.11 times the target); SSE chunk, " +
			"coalesced (20 per write, 16 streams) (1.05 times the target).",
		"- CPU time per request, in times of minimal's, over the loads: gateway 1.00, right 1.0 2.50 and " +
			"faulty 2.0 2.00.",
		"- CPU time per streamed chunk, in times of minimal's, over the loads: gateway 1.00 and right 1.0 25.00.",
		"- An open stream takes: gateway 42 KB, minimal 30 KB and right 1.0 90 KB.",
		"- right 1.0: all of 20,000 responses were right.",
		"- faulty 2.0: 3 of 1,000 responses were wrong or missing.",
		"- The machine was quiet: others used at most 0.0 % of the measured CPU.",
	} {
		assert.Contains(t, closing, line)
	}

	r := withPeers()
	r.compared[0].ratios = []float64{1.38}
	r.compared[0].subject.slices[0].others = 300 * time.Millisecond
	_, closing, _ = strings.Cut(written(t, r), "## What this shows")
	assert.Contains(t, closing, "The gateway meets 3 of 5 targets. Missed: 2 KB, 16 clients (1.53 times the target); ")
	r.compared[0].ratios = []float64{0.9003}
	_, closing, _ = strings.Cut(written(t, r), "## What this shows")
	assert.Contains(t, closing, "Missed: 2 KB, 16 clients (less than 1 % above the target); ")
	assert.Contains(t, closing, "The machine was not quiet: others used up to 15 %")
}

func TestHalfLoadShowsWhatWasServed(t *testing.T) {
	r := withPeers()
	for _, p := range []*series{&r.half.subject, &r.half.peers[0].series} {
		p.slices = []slice{{units: 500, wall: time.Second, samples: []time.Duration{3 * time.Millisecond}}}
	}
	text := written(t, r)
	assert.Contains(t, text, "| p50 / p99 | 3.00 / 3.00 | 1.00 / 1.00 | 3.00 / 3.00 | – | 1.00 / 1.00 |")
	assert.Contains(t, text, "| p50 above direct | 2.00 | 0.00 | 2.00 | – | 0.00 |")
	assert.Contains(t, text, "| served of that rate | 50 % | 100 % | 50 % | – | 100 % |")
	assert.Contains(t, text, "right 1.0 3.00 / 3.00 ms (serving 50 % of the load); direct 1.00 / 1.00 ms.")
}

func TestAReportWithoutPeersHasNoColumnsForThem(t *testing.T) {
	text := written(t, measured(1))
	assert.Contains(t, text, "| ratio | target |  | CPU busy |")
	assert.NotContains(t, strings.ToLower(text), "peer")
}

func TestFaultsOfPeersDoNotFailTheRun(t *testing.T) {
	require.NoError(t, withPeers().verdict(full))
	require.NoError(t, withPeers().verdict(short))
}
