// SPDX-License-Identifier: Apache-2.0

package main

import (
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// measured returns a report: the first scenario has the given ratio, and all other figures are well within their
// targets.
func measured(ratio float64) *report {
	one := slice{units: 1000, wall: time.Second, cpu: 50 * time.Millisecond, samples: []time.Duration{time.Millisecond}}
	c := compared{
		scenario: scenarios[0],
		subject:  series{name: "gateway", slices: []slice{one}},
		base:     series{name: "minimal", slices: []slice{one}},
		direct:   series{name: "direct", slices: []slice{one}},
		ratios:   []float64{ratio},
	}
	return &report{
		title:    "Load benchmark",
		pace:     full,
		compared: []compared{c},
		footprints: []footprint{
			{name: "gateway", atRest: []float64{9 << 20}, perStream: []float64{40 << 10, 50 << 10, 42 << 10},
				started: []time.Duration{20 * time.Millisecond}},
			{name: "minimal", atRest: []float64{8 << 20}, perStream: []float64{30 << 10},
				started: []time.Duration{5 * time.Millisecond}},
		},
	}
}

func TestTheTableShowsEachFigureBesideItsTarget(t *testing.T) {
	var text strings.Builder
	require.NoError(t, measured(1.2).write(&text))
	assert.Contains(t, text.String(),
		"| 2 KB, 16 clients | 50.00 | 50.00 | **1.200** (1.200 to 1.200) | 0.90 | **missed** |")
	assert.Contains(t, text.String(), "| 42.0 (40.0 to 50.0) | 30.0 (30.0 to 30.0) | 45 | met |")
	assert.Contains(t, text.String(), "| 20.0 (20.0; 1) | 5.0 (5.0; 1) | 50 | met |")
	assert.Contains(t, text.String(), "| 1.00 / 1.00 |")
}

func TestThePlotsArePicturesWithARowForEachLoad(t *testing.T) {
	draw := func(r *report) []int {
		stem := filepath.Join(t.TempDir(), "x")
		require.NoError(t, r.draw(stem))
		var heights []int
		for _, p := range r.pictures {
			f, err := os.Open(filepath.Join(filepath.Dir(stem), p.file))
			require.NoError(t, err)
			defer f.Close()
			picture, err := png.DecodeConfig(f)
			require.NoError(t, err)
			heights = append(heights, picture.Height)
		}
		return heights
	}
	one, two, peers := measured(1.2), measured(0.9), withPeers()
	two.compared = append(two.compared, two.compared...)
	assert.Greater(t, draw(two)[0], draw(one)[0])
	assert.Greater(t, draw(peers)[0], draw(one)[0])
	assert.Len(t, peers.pictures, 3, "requests, streams, many endpoints")

	var text strings.Builder
	require.NoError(t, peers.write(&text))
	for _, file := range []string{"x-requests.png", "x-streams.png", "x-endpoints.png"} {
		assert.Contains(t, text.String(), "]("+file+")")
	}
}

func TestAWrongResponseFailsAtAnyPace(t *testing.T) {
	r := measured(1)
	r.faultCount, r.faults = 1, []string{"client: the response is another request's"}
	for _, p := range []pace{full, short} {
		require.ErrorContains(t, r.verdict(p), "another request's")
	}
	r.calibration = true
	require.ErrorContains(t, r.verdict(short), "another request's")
}

func TestOnlyTheQuickPaceFailsAndOnlyFarBeyondATarget(t *testing.T) {
	require.NoError(t, measured(2.24).verdict(short))
	require.ErrorContains(t, measured(2.26).verdict(short), "2 KB, 16 clients")
	require.NoError(t, measured(2.26).verdict(full), "a missed target is shown, and is for people to judge")

	r := measured(1)
	r.footprints[0].perStream = []float64{113 << 10}
	require.ErrorContains(t, r.verdict(short), "memory per open stream")
	r = measured(1)
	r.footprints[0].started = []time.Duration{126 * time.Millisecond}
	require.ErrorContains(t, r.verdict(short), "start to first response")
	r = measured(1)
	r.endpoints = []compared{{scenario: scenario{name: "endpoints"}, ratios: []float64{2.6}}}
	require.ErrorContains(t, r.verdict(short), "endpoints")
}

func TestEqualProgramsMustComeOutEqual(t *testing.T) {
	r := measured(1.02)
	r.calibration = true
	require.NoError(t, r.verdict(full))
	r = measured(1.04)
	r.calibration = true
	require.ErrorContains(t, r.verdict(full), "two equal programs differ")
}

func TestAKnownSlowdownMustBeSeen(t *testing.T) {
	r := measured(1)
	r.calibration = true
	spin := r.compared[0]
	spin.subject.slices = []slice{{units: 1000, cpu: 50*time.Millisecond + 1000*calibration}}
	r.spin = &spin
	require.NoError(t, r.verdict(full))
	spin.subject.slices = []slice{{units: 1000, cpu: 50*time.Millisecond + 500*calibration}}
	require.ErrorContains(t, r.verdict(full), "measured 50 % of it")
}
