// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/lab/internal/paced"
	"github.com/pdkit/pdkit/lab/internal/realtimetest"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The bounds are wide, since tests share their machine. docs/simulation.md has what a quiet one shows.
func TestVirtualTimeIsLikeRealTime(t *testing.T) {
	if testing.Short() {
		t.Skip("15 s of real time")
	}
	load := newLoad("tiny", "", 1, 150, 12)
	by := objectives{400 * time.Millisecond, 30 * time.Millisecond}
	realtimetest.Try(t, func(check assert.TestingT) {
		c, err := compare(t.Context(), nil, pick.RoundRobin(), load, 1)
		require.NoError(t, err)
		t.Log(c.row("round-robin", 1, by))
		ttft, _, itl, _ := c.errors()
		assert.Less(check, math.Abs(ttft), .3)
		assert.Less(check, math.Abs(itl), .3)
		assert.InDelta(check, c.real.good(by), c.virtual.good(by), 25)
		assert.Greater(check, c.alike(), 80.)
	})
}

// What is measured of engines over HTTP is the model that paces them, and predicts another load. The bounds are wide,
// as above.
func TestAFitOfEnginesFindsTheirModelAndPredictsALoad(t *testing.T) {
	if testing.Short() {
		t.Skip("20 s of real time")
	}
	slow := spec()
	slow.Base, slow.PerPrefillToken, slow.PerAttention = .02, 4e-4, 2e-7
	p, d := spec(), slow
	truth := paced.Fleet{Prefill: 1, Specs: []model.Spec{p, d}, Link: model.Link{Latency: .01, BytesPerSecond: 5e8}}
	stop, err := truth.Start()
	require.NoError(t, err)
	defer stop()
	realtimetest.Try(t, func(check assert.TestingT) {
		var out bytes.Buffer
		limits := model.Spec{StepTokens: 512, MaxRunning: 256}
		f, err := fit(t.Context(), &out, truth.URLs, "tiny", limits, 1)
		t.Log("\n" + out.String())
		require.NoError(t, err)
		for i, want := range truth.Specs {
			got := f.Specs[i]
			assert.Equal(check, want.Blocks, got.Blocks)
			assert.Equal(check, want.BlockSize, got.BlockSize)
			for _, load := range []model.Load{{Requests: 1}, {Requests: 6, ContextTokens: 1200},
				{Requests: 1, PrefillTokens: 400, Attention: 80_000},
				{Requests: 1, PrefillTokens: 400, Attention: 400_000},
				{Requests: 3, ContextTokens: 300, PrefillTokens: 300}} {
				assert.InEpsilon(check, want.Seconds(load), got.Seconds(load), .3, "%+v", load)
			}
		}
		kv := func(l model.Link, s model.Spec) float64 {
			return l.Transfer(&model.Port{}, &model.Port{}, 400*s.BytesPerToken, 0)
		}
		assert.InEpsilon(check, kv(truth.Link, p), kv(f.Link, f.Specs[0]), .5)

		c, err := compare(t.Context(), f, pick.RoundRobin(), newLoad("tiny", "", 1, 40, 5), 1)
		require.NoError(t, err)
		ttft, itl := typical([]*comparison{c})
		t.Log(c.row("round-robin", 1, objectives{}))
		assert.Less(check, ttft, .3)
		assert.Less(check, itl, .3)
	})
}

func TestALoadIsTheSameEachTime(t *testing.T) {
	a, b := newLoad("tiny", "", 1, 100, 10), newLoad("tiny", "", 1, 100, 10)
	require.Equal(t, a, b)
	require.NotEqual(t, a, newLoad("tiny", "", 2, 100, 10))
	shared := map[uint64]int{}
	for _, q := range a {
		for _, key := range q.Keys(spec().BlockSize) {
			shared[key]++
		}
		require.Less(t, len(q.Prompt)+q.Output, spec().Blocks*spec().BlockSize)
	}
	most := 0
	for _, n := range shared {
		most = max(most, n)
	}
	require.Greater(t, most, 1, "some prompts begin alike")
}

func TestWrongFlagsAreRefused(t *testing.T) {
	for _, args := range [][]string{{"-requests", "0"}, {"-policies", "fastest"}, {"-rate", "0"}, {"more"}, {"-x"},
		{"-engines", "http://127.0.0.1:1"}, {"-engines", "http://127.0.0.1:1,http://127.0.0.1:1"}} {
		require.Error(t, command(t.Context(), args, &bytes.Buffer{}), args)
	}
}
