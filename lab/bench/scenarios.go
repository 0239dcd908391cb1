// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"time"
)

// pace says how long each part of the measurement takes, and how often it is repeated.
type pace struct {
	quick  bool
	slice  time.Duration // measured part of a slice
	lead   time.Duration // unmeasured part before it: connections, caches, heap
	rounds int           // of A B B A
	direct int           // slices of the direct legs
	settle time.Duration // before memory is read
	memory int           // times that memory is read, of fresh processes
	starts int           // of each program
}

var (
	full = pace{slice: 2 * time.Second, lead: 400 * time.Millisecond, rounds: 4, direct: 2, settle: 3 * time.Second,
		memory: 3, starts: 15}
	short = pace{quick: true, slice: 500 * time.Millisecond, lead: 250 * time.Millisecond, rounds: 1, direct: 1,
		settle: 1500 * time.Millisecond, memory: 1, starts: 5}
)

// scenario is one kind of load.
type scenario struct {
	name     string
	size     int // of the body
	clients  int
	stream   bool
	perWrite int
	chunks   int // of each stream; 0: streams live as long as the slice
	interval time.Duration
	target   float64 // most that the gateway may cost, as a ratio to minimal
	noisy    int     // factor for the rounds of a load whose slices differ much; 0 is 1
	long     bool    // it takes too long for a short run
	rate     float64 // requests per second; 0: each client sends its next request when it has a response
}

// scenarios are the loads. Their targets are what the project aims at; docs/performance.md says what is in the way of
// those that are missed.
var scenarios = []scenario{
	{name: "2 KB, 16 clients", size: 2 << 10, clients: 16, target: 0.90},
	{name: "2 KB, 1 client", size: 2 << 10, clients: 1, target: 1.00},
	{name: "2 KB, 64 clients", size: 2 << 10, clients: 64, target: 0.90},
	{name: "16 KB, 16 clients", size: 16 << 10, clients: 16, target: 0.90},
	{name: "128 KB, 16 clients", size: 128 << 10, clients: 16, target: 0.90},
	{name: "1 MB, 8 clients", size: 1 << 20, clients: 8, target: 0.95},
	{name: "SSE chunk, coalesced (20 per write, 16 streams)", size: 2 << 10, clients: 16, stream: true,
		perWrite: 20, chunks: 10_000, target: 0.95},
	{name: "SSE chunk, paced (128 streams, one per 20 ms)", size: 2 << 10, clients: 128, stream: true,
		// most of the time goes into waking an idle CPU: slices differ by a quarter
		perWrite: 1, interval: 20 * time.Millisecond, target: 0.85, noisy: 3},
	{name: "SSE chunk, slow (1,000 streams, one per 500 ms)", size: 2 << 10, clients: 1000, stream: true,
		perWrite: 1, interval: 500 * time.Millisecond, target: 0.85, noisy: 3, long: true},
}

// halfLoad is measured at half the rate that the gateway reaches when its clients wait for nothing but responses. Its
// samples are times to the first token.
var halfLoad = scenario{name: "TTFT at half load", size: 2 << 10, clients: 64, stream: true, perWrite: 1, chunks: 16}

// Targets that are not ratios to minimal.
const (
	targetStreamBytes = 45 << 10
	targetStart       = 50 * time.Millisecond
	targetEndpoints   = 1.03
	streamsOpen       = 1000
)

// fleets are the numbers of endpoints beside two, half of them for each role; a short run takes the first.
var fleets = []int{1024, 4096}

// chosen returns the scenarios whose name contains a word. Without a word a short run leaves out the long ones.
func (p pace) chosen(only string) []scenario {
	var list []scenario
	for _, s := range scenarios {
		if strings.Contains(s.name, only) && (only != "" || !p.quick || !s.long) {
			list = append(list, s)
		}
	}
	return list
}
