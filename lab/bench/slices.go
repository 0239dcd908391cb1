// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/lab/bench/internal/cpu"
	"github.com/pdkit/pdkit/lab/bench/internal/load"
	"github.com/pdkit/pdkit/lab/internal/proc"
)

// slice is what was measured of one program under one load for a short time.
type slice struct {
	units   int64 // requests, or chunks of streams
	wall    time.Duration
	cpu     time.Duration // of the program under test
	others  time.Duration // CPU time of other processes on its CPU
	steal   time.Duration
	samples []time.Duration

	asked, failed int64 // requests, those of the unmeasured time included
}

// cost is CPU time per unit, in microseconds.
func (s slice) cost() float64 { return float64(s.cpu) / float64(s.units) / 1e3 }

// series is all slices of one program in one scenario.
type series struct {
	name   string
	slices []slice

	// Of a peer only, whose faults are shown in place of ending the run.
	asked, failed int64  // requests; failed: without a right response
	reason        string // the first fault
	why           string // it was not measured, or not to the end
}

// compared is one scenario's result.
type compared struct {
	scenario scenario
	subject  series
	base     series
	direct   series
	ratios   []float64 // of the subject's cost to the base's, for each pair of neighbouring slices
	peers    []rival
}

// rival is a peer's result in one scenario.
type rival struct {
	series
	ratios []float64 // of its cost to the base's, as the subject's
}

// compare runs slices of programs in the order A, B, P, Q and then back, P and Q being peers, and compares each slice
// with the base's next to it. A machine that becomes slower, or a noisy neighbour, then affects all programs alike.
func (l *lab) compare(ctx context.Context, s scenario, subject, base *program, peers ...*contender) (compared, error) {
	c := compared{scenario: s, subject: series{name: subject.Name}, base: series{name: base.Name},
		direct: series{name: "direct"}}
	take := func(p *program, to *series) error {
		got, err := l.slice(ctx, s, p)
		if err != nil {
			return fmt.Errorf("%s, %s: %w%s", s.name, to.name, err, p.lastWords())
		}
		to.slices = append(to.slices, got)
		return nil
	}
	turns := []func() error{
		func() error { return take(subject, &c.subject) },
		func() error { return take(base, &c.base) },
	}
	c.peers = make([]rival, len(peers))
	for i, p := range peers {
		c.peers[i].series = l.ensure(ctx, p)
		turns = append(turns, func() error { return l.takePeer(ctx, s, p, &c.peers[i].series) })
	}
	if err := l.thereAndBack(s, turns); err != nil {
		return c, err
	}
	for range l.pace.direct {
		if err := take(nil, &c.direct); err != nil {
			return c, err
		}
	}
	c.ratios = ratiosTo(c.base, c.subject)
	var line strings.Builder
	fmt.Fprintf(&line, "%-50s %s %.2f µs, %s %.2f µs, ratio %.3f", s.name, c.subject.name,
		median(costs(c.subject)), c.base.name, median(costs(c.base)), median(c.ratios))
	for i := range c.peers {
		p := &c.peers[i]
		p.ratios = ratiosTo(c.base, p.series)
		fmt.Fprintf(&line, "; %s: %s", p.name, p.cell())
	}
	l.say("%s", &line)
	return c, nil
}

// thereAndBack takes the turns in their order and then in the opposite one, as often as the pace and the scenario say.
func (l *lab) thereAndBack(s scenario, turns []func() error) error {
	for range l.pace.rounds * max(s.noisy, 1) {
		for _, turn := range turns {
			if err := turn(); err != nil {
				return err
			}
		}
		for _, turn := range slices.Backward(turns) {
			if err := turn(); err != nil {
				return err
			}
		}
	}
	return nil
}

// ratiosTo compares the costs of slices that were taken in the same round. A peer may have fewer.
func ratiosTo(base, s series) []float64 {
	var list []float64
	for i, slice := range s.slices {
		list = append(list, slice.cost()/base.slices[i].cost())
	}
	return list
}

// leastUnits is the smallest number of requests or chunks from which a slice's cost is computed.
const leastUnits = 20

// slice puts one program under load for a short time. For nil the clients send both legs themselves.
func (l *lab) slice(ctx context.Context, s scenario, p *program) (slice, error) {
	var stop atomic.Bool
	meter := &load.Meter{}
	crowd := l.crowd(s, p, s.clients, meter, &stop)
	defer crowd.end()
	if s.chunks == 0 && s.stream {
		if err := crowd.open(ctx); err != nil {
			return slice{failed: meter.Failed.Load(), asked: meter.Failed.Load() + meter.Open.Load()}, err
		}
	} else {
		crowd.begin(ctx, 0, s.clients)
	}
	if err := proc.Pause(ctx, l.pace.lead); err != nil {
		return slice{}, err
	}
	count := &meter.Requests
	if s.stream {
		count = &meter.Chunks
	}
	before, err := l.reading(p, count)
	if err != nil {
		return slice{}, err
	}
	meter.Sampling.Store(true)
	if err := proc.Pause(ctx, l.pace.slice); err != nil {
		return slice{}, err
	}
	after, err := l.reading(p, count)
	// On a busy machine a short slice may end before any large request does. Then the slice goes on.
	for more := 0; err == nil && after.units-before.units < leastUnits && more < 10; more++ {
		if err = proc.Pause(ctx, l.pace.slice); err == nil {
			after, err = l.reading(p, count)
		}
	}
	if err != nil {
		return slice{}, err
	}
	meter.Sampling.Store(false)
	crowd.end()
	board := l.siteOf(p).board
	board.Settle()
	got := slice{
		units: after.units - before.units, wall: after.at.Sub(before.at), cpu: after.used - before.used,
		steal: after.share.Steal - before.share.Steal, samples: crowd.samples(),
		asked: meter.Requests.Load() + meter.Failed.Load(), failed: meter.Failed.Load(),
	}
	got.others = max(0, after.share.Busy-before.share.Busy-got.cpu)
	if got.units == 0 {
		faults, _ := board.Faults()
		return got, fmt.Errorf("nothing was served: %s", strings.Join(faults, "\n  "))
	}
	return got, nil
}

// reading holds all counters at one moment. A slice is the difference of two readings.
type reading struct {
	at    time.Time
	units int64
	used  time.Duration
	share cpu.Share
}

func (l *lab) reading(p *program, count *atomic.Int64) (reading, error) {
	share, err := cpu.Of(l.theirs)
	if err != nil {
		return reading{}, err
	}
	used, err := usedBy(p)
	return reading{at: time.Now(), units: count.Load(), used: used, share: share}, err
}

// crowd is the clients of one slice.
type crowd struct {
	clients []*load.Client
	meter   *load.Meter
	stop    *atomic.Bool
	wg      sync.WaitGroup
}

// crowd makes the clients of a scenario. Paced streams write at different times within the interval.
func (l *lab) crowd(s scenario, p *program, n int, meter *load.Meter, stop *atomic.Bool) *crowd {
	c := &crowd{meter: meter, stop: stop}
	prompt := load.NewPrompt(s.size, s.stream)
	var every time.Duration
	if s.rate > 0 {
		every = time.Duration(float64(n) / s.rate * float64(time.Second))
	}
	for i := range n {
		plan := &load.Plan{
			Prompt: prompt, Chunks: s.chunks, PerWrite: s.perWrite, Interval: s.interval, Stop: stop, Every: every,
			Phase: max(s.interval, every) * time.Duration(i) / time.Duration(n),
		}
		c.clients = append(c.clients, load.NewClient(l.siteOf(p).board, i, l.target(p), plan, meter))
	}
	return c
}

// begin starts some of the clients.
func (c *crowd) begin(ctx context.Context, from, to int) {
	for _, client := range c.clients[from:to] {
		c.wg.Go(func() { client.Run(ctx, c.stop) })
	}
}

// open starts all clients, 50 in each 50 ms, and waits until the first events of their streams have come.
func (c *crowd) open(ctx context.Context) error {
	for from := 0; from < len(c.clients); from += 50 {
		c.begin(ctx, from, min(from+50, len(c.clients)))
		if err := proc.Pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	return c.waitOpen(ctx, int64(len(c.clients)))
}

// waitOpen waits until the first events of so many streams have come.
func (c *crowd) waitOpen(ctx context.Context, n int64) error {
	for deadline := time.Now().Add(20 * time.Second); c.meter.Open.Load() < n; {
		if time.Now().After(deadline) {
			return fmt.Errorf("only %d of %d streams are open after 20 s", c.meter.Open.Load(), n)
		}
		if err := proc.Pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// end waits for the requests that are under way, and closes the connections.
func (c *crowd) end() {
	c.stop.Store(true)
	c.wg.Wait()
	for _, client := range c.clients {
		client.Close()
	}
}

func (c *crowd) samples() []time.Duration {
	var all []time.Duration
	for _, client := range c.clients {
		all = append(all, client.Samples...)
	}
	return all
}
