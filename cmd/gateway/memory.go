// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"runtime/debug"

	"github.com/KimMachineGun/automemlimit/memlimit"
)

// mostFloor is how much a gateway may allocate between two collections at least, in bytes, where the memory limit
// allows. The live heap of a gateway is a few MB, so that Go's default would collect each few hundred requests.
const mostFloor = 32 << 20

// collector sets the garbage collector's targets, unless the operator has: the memory limit is 90 % of the container's,
// and the heap has a floor, which the caller must keep alive. It is called once, before anything is served.
func collector() (floor []byte) {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return nil
	}
	limit, err := memlimit.Set()
	if err != nil { // a file of the kernel's that cannot be read: no limit is known
		limit = debug.SetMemoryLimit(-1)
	}
	return heapFloor(limit)
}

// heapFloor is memory that is never touched, so that it costs address space only. The collector counts it as live and
// waits until as much again is allocated. With many streams the live heap is larger than it, and it matters no more.
// A target in percent (GOGC) would grow with the live heap instead.
func heapFloor(limit int64) []byte { return make([]byte, min(mostFloor, limit/16)) }
