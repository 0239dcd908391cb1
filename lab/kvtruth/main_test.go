// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/lab/internal/realtimetest"
)

// The index is right about a simulated engine whose cache is small, so that blocks are evicted all the time.
func TestTheIndexSaysWhatASimulatedEngineCounts(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{BlockSize: 16, Blocks: 96, KVEvents: &enginesim.KVEvents{}})
	require.NoError(t, err)
	defer e.Close()
	found, err := (&run{model: "tiny", requests: 40, longest: 600, seed: 7}).do(t.Context(), e.URL())
	require.NoError(t, err)
	t.Log(found)
	assert.Equal(t, found.Requests, found.Exact)
	assert.Equal(t, found.Exact, found.Right, "%s", found)
	assert.Positive(t, found.Cached)
	require.NoError(t, found.judge())
	found.Right -= found.Exact/100 + 1
	require.Error(t, found.judge())
	found.Exact = 0
	require.Error(t, found.judge(), "it never claimed to know")
}

// Whatever happens to an engine, its events or its reader, the index stops claiming to be exact within a second, and is
// right when it claims it again.
func TestTheIndexIsRightAfterEachFault(t *testing.T) {
	played := slices.DeleteFunc(slices.Clone(faults), func(f fault) bool {
		return strings.Contains(f.name, "slow reader") // how slow depends on the machine
	})
	// A simulated engine is back at once, so a request may come in the second in which nobody can know of its restart.
	realtimetest.Try(t, func(check assert.TestingT) {
		b := &bench{run: &run{model: "tiny", requests: 5, longest: 600, seed: 7}, block: 16, steps: 300}
		var err error
		b.engine, err = startSimulated(b.steps)
		require.NoError(t, err)
		defer b.engine.Close()
		require.NoError(t, b.connect())
		rows, err := b.all(t.Context(), played)
		t.Log("\n" + table(rows))
		assert.NoError(check, err)
		for _, row := range rows {
			assert.NoError(check, row.judge())
		}
	})
}
