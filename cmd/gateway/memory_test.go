// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math"
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/assert"
)

// target is the heap's size at which the next collection begins, in bytes.
func target() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.NextGC)
}

// What other tests left on the heap moves both targets by the same, and goes away in the first collections.
func TestTheHeapHasAFloor(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	target()
	without := target()
	floor := heapFloor(math.MaxInt64)
	with := target()
	runtime.KeepAlive(floor)
	assert.Greater(t, with-without, int64(len(floor)*3/2), "as much again may be allocated before a collection")
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
