// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math"
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var garbage []byte

// collections is how often 48 MB of garbage are collected.
func collections() int {
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 48 << 10 {
		garbage = make([]byte, 1<<10)
	}
	runtime.ReadMemStats(&after)
	return int(after.NumGC - before.NumGC)
}

func TestTheHeapHasAFloor(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	without := collections()
	floor := heapFloor(math.MaxInt64)
	with := collections()
	runtime.KeepAlive(floor)
	require.Greater(t, without, 4, "so many collections show nothing")
	assert.LessOrEqual(t, with, 2)
	assert.Len(t, heapFloor(160<<20), 10<<20, "a small container has a low floor")
}

func TestTheOperatorsTargetsHold(t *testing.T) {
	for _, name := range []string{"GOGC", "GOMEMLIMIT"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, "50")
			before := debug.SetMemoryLimit(-1)
			assert.Nil(t, collector())
			assert.Equal(t, before, debug.SetMemoryLimit(-1))
		})
	}
}
