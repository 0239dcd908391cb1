// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The bounds are wide, since tests share their machine. docs/simulation.md has what a quiet one shows.
func TestVirtualTimeIsLikeRealTime(t *testing.T) {
	if testing.Short() {
		t.Skip("15 s of real time")
	}
	load := newLoad(1, 150, 12)
	c, err := compare(t.Context(), pick.RoundRobin(), load, 1)
	require.NoError(t, err)
	t.Log(c.row("round-robin", 1))
	ttft, _, itl, _ := c.errors()
	assert.Less(t, math.Abs(ttft), .3)
	assert.Less(t, math.Abs(itl), .3)
	assert.InDelta(t, c.real.good(), c.virtual.good(), 25)
	assert.Greater(t, c.alike(), 80.)
}

func TestALoadIsTheSameEachTime(t *testing.T) {
	a, b := newLoad(1, 100, 10), newLoad(1, 100, 10)
	require.Equal(t, a, b)
	require.NotEqual(t, a, newLoad(2, 100, 10))
	shared := map[uint64]int{}
	for _, q := range a {
		for _, key := range q.keys() {
			shared[key]++
		}
		require.Less(t, len(q.prompt)+q.output, 2000*blockSize)
	}
	most := 0
	for _, n := range shared {
		most = max(most, n)
	}
	require.Greater(t, most, 1, "some prompts begin alike")
}

func TestWrongFlagsAreRefused(t *testing.T) {
	for _, args := range [][]string{{"-requests", "0"}, {"-policies", "fastest"}, {"-rate", "0"}, {"more"}, {"-x"}} {
		require.Error(t, command(t.Context(), args, &bytes.Buffer{}), args)
	}
}
