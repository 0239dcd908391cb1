// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/lab/internal/proc"
)

// soak is a long run of mixed requests, of which a few meet a fault. It looks for what grows.
type soak struct {
	fleet    *fleet
	requests int
	seed     uint64
	took     time.Duration
	tallies  tallies
	injected map[string]int // by the kind's name
	mu       sync.Mutex
	samples  []gauges // after each part; heap is the least that was seen during it
	errs     []error
}

// soakFaults are the scripted faults of an engine, and a client that leaves.
var soakFaults = []struct {
	name  string
	order injection
}{
	{"status 500", injection{Kind: enginesim.FaultStatus, Status: 500}},
	{"status 503", injection{Kind: enginesim.FaultStatus, Status: 503}},
	{"connection reset before the response", injection{Kind: enginesim.FaultReset}},
	{"connection reset after 3 events", injection{Kind: enginesim.FaultResetStream, AfterChunks: 3}},
	{"no response", injection{Kind: enginesim.FaultStall}},
	{"silence after 2 events", injection{Kind: enginesim.FaultStallStream, AfterChunks: 2}},
	{garbage, injection{Kind: enginesim.FaultGarbage}},
	{"a redirect", injection{Kind: enginesim.FaultRedirect}},
	{"half a second late", injection{Kind: enginesim.FaultDelay, Delay: 500 * time.Millisecond}},
	{"KV that cannot be loaded", injection{Kind: enginesim.FaultLoadFailure}},
	{"the client leaves", injection{}},
}

// garbage is for prefill engines only: what decode answers with status 200 is the client's, whatever it is.
const garbage = "prefill answers what is not JSON"

// faultShare is the share of requests that meet a fault.
const faultShare = 0.01

func runSoak(ctx context.Context, requests, workers int, seed uint64) (*soak, error) {
	f, err := openFleet(ctx, fleetOptions{orders: orders, each: 2, retry: 3,
		tune: func(_ *order, cfg *enginesim.Config) { cfg.ITL, cfg.PrefillRate = 0, 0 }})
	if err != nil {
		return nil, err
	}
	defer f.close()
	s := &soak{fleet: f, requests: requests, seed: seed, tallies: newTallies(f), injected: map[string]int{}}
	begun := time.Now()
	parts := 10
	if requests < 20_000 {
		parts = 4
	}
	for part := range parts {
		g, err := s.part(ctx, part, requests/parts, workers)
		if err != nil {
			return nil, err
		}
		s.samples = append(s.samples, g)
	}
	s.took = time.Since(begun)
	s.ledger()
	return s, ctx.Err()
}

// ledger says what of the engines' KV was not used as it must be.
func (s *soak) ledger() {
	for _, m := range s.fleet.models {
		for _, e := range m.engines {
			if _, err := e.ask(injection{}); err != nil {
				s.errs = append(s.errs, fmt.Errorf("%s: %w", e.name, err))
			}
			for kind, n := range e.total().Breaches {
				s.errs = append(s.errs, fmt.Errorf("%s: KV ledger: %s, %d times", e.name, kind, n))
			}
		}
	}
}

// part sends a part of the requests, and says what the gateway holds when they are through.
func (s *soak) part(ctx context.Context, part, requests, workers int) (gauges, error) {
	heap, stop := s.leastHeap(ctx)
	var next atomic.Int64
	var all sync.WaitGroup
	for w := range workers {
		r := rand.New(rand.NewPCG(s.seed, uint64(part*1000+w)))
		all.Go(func() {
			for next.Add(1) <= int64(requests) && ctx.Err() == nil {
				s.one(ctx, r)
			}
		})
	}
	all.Wait()
	stop()
	var g gauges
	err := eventually(ctx, 30*time.Second, "requests still run", func() (err error) {
		if g, err = s.fleet.gauges(ctx); err == nil && g.sessions > 0 {
			err = fmt.Errorf("%d sessions", g.sessions)
		}
		return err
	})
	_ = proc.Pause(ctx, idlePause)
	if err == nil {
		g, err = s.fleet.gauges(ctx)
	}
	g.heap = *heap
	return g, err
}

// leastHeap watches the gateway's heap until stop is called. The least of it is what a collection left.
func (s *soak) leastHeap(ctx context.Context) (least *int64, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	least = new(int64)
	go func() {
		defer close(done)
		for proc.Pause(ctx, 100*time.Millisecond) == nil {
			if g, err := s.fleet.gauges(ctx); err == nil && (*least == 0 || g.heap < *least) {
				*least = g.heap
			}
		}
	}()
	return least, func() { cancel(); <-done }
}

// one sends one request, with a fault for a few.
func (s *soak) one(ctx context.Context, r *rand.Rand) {
	m := s.fleet.models[r.IntN(len(s.fleet.models))]
	size := 40 + r.IntN(600)
	if r.IntN(50) == 0 {
		size = 4000
	}
	q, leave := newRequest(m, r, size, 4+r.IntN(40)), time.Duration(0)
	if r.Float64() < faultShare {
		fault, engines := soakFaults[r.IntN(len(soakFaults))], len(m.engines)
		if fault.name == garbage {
			engines /= 2 // prefill comes first
		}
		if fault.order.Kind == 0 {
			leave = span(r, 500*time.Microsecond, 5*time.Millisecond)
		} else if _, err := m.engines[r.IntN(engines)].ask(fault.order); err != nil {
			s.mu.Lock()
			s.errs = append(s.errs, err)
			s.mu.Unlock()
		}
		s.mu.Lock()
		s.injected[fault.name]++
		s.mu.Unlock()
	}
	s.fleet.send(ctx, q, leave, s.tallies[m.name])
}

// err says whether anything was as it must not be.
func (s *soak) err() error {
	errs := append(s.errs, s.tallies.errs(s.fleet)...)
	// The first part fills pools. After that nothing grows with the number of requests.
	first, last := s.samples[1], s.samples[len(s.samples)-1]
	errs = append(errs, last.grown(first))
	if last.heap > first.heap*5/4+2<<20 {
		errs = append(errs, fmt.Errorf("the heap grows from %s to %s", mib(first.heap), mib(last.heap)))
	}
	return errors.Join(errs...)
}

func (s *soak) report(w io.Writer) {
	p := printer(w, "Soak", "soak")
	faults := 0
	for _, n := range s.injected {
		faults += n
	}
	p("%d requests in %s on %d CPUs, seed %d: five orders behind one gateway process, all APIs, streamed or not; %d "+
		"of them, about 1 %%, met a scripted fault. A request is tried at up to three pairs. Each response is "+
		"compared with that of an engine that serves alone.\n", s.requests, s.took.Round(time.Second),
		runtime.NumCPU(), s.seed, faults)
	p("| order | requests | right | refused by code | cut, and told | left | wrong | silently cut | hung | lost |\n" +
		"|---|---|---|---|---|---|---|---|---|---|")
	for _, m := range s.fleet.models {
		t := s.tallies[m.name]
		p("| `%s` | %d | %s |", m.name, t.all(), t.cells(right, refused, cutAloud, left, wrong, cutSilent, hung, lost))
	}
	p("\n| fault | injected |\n|---|---|")
	for _, fault := range soakFaults {
		p("| %s | %d |", fault.name, s.injected[fault.name])
	}
	p("\nThe gateway's process after each part, when no request runs. The heap is the least that was seen during the " +
		"part: what is left after a collection.\n")
	p("| requests | heap in use | resident | goroutines | file descriptors |\n|---|---|---|---|---|")
	for i, g := range s.samples {
		p("| %d | %s | %s | %d | %d |", s.requests/len(s.samples)*(i+1), mib(g.heap), mib(g.resident), g.goroutines,
			g.descriptors)
	}
	must(p, s.err())
}
