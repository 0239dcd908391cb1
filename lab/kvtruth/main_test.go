// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
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
