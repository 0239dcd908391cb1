// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/lab/internal/proc"
)

// chaos is a run: clients send requests all the time while faults are played at the engines of each order.
type chaos struct {
	fleet   *fleet
	seed    uint64
	took    time.Duration
	gateway netip.Addr // where it is on the wire
	tallies tallies

	mu     sync.Mutex
	faults map[string]map[string]int // by order and kind

	before, after gauges
	sound         map[string]time.Duration // when each order served all requests rightly, after the last fault
	errs          []error                  // what must not be
}

// soundRequests is how many requests of each order must get the right response after the faults, in a row, within
// soundAgain. A prefill engine of mooncake may take several leases: each task of its sender waits for one, for every
// request whose other leg was lost.
const (
	soundRequests = 20
	soundAgain    = 2 * time.Minute
)

func ipOf(address string) string {
	host, _, _ := net.SplitHostPort(address) // it was joined from the two
	return host
}

// runChaos plays faults for so long and returns what came of it.
func runChaos(ctx context.Context, length time.Duration, workers int, seed uint64, wired bool) (*chaos, error) {
	f, err := openFleet(ctx, fleetOptions{wire: wired, orders: orders, each: 2, retry: 3, decides: seed%2 == 1})
	if err != nil {
		return nil, err
	}
	defer f.close()
	c := &chaos{fleet: f, seed: seed, tallies: newTallies(f), faults: map[string]map[string]int{},
		sound: map[string]time.Duration{}, gateway: netip.MustParseAddr(wirePrefix + "1")}
	for _, m := range f.models {
		c.faults[m.name] = map[string]int{}
	}
	c.check("before the faults", c.settled(ctx)) // also makes each connection once
	_ = proc.Pause(ctx, idlePause)
	if c.before, err = f.gauges(ctx); err != nil {
		return nil, err
	}
	clear(c.sound)
	begun := time.Now()
	c.storm(ctx, length, workers)
	c.took = time.Since(begun)
	c.check("after the faults", c.settled(ctx))
	c.leaks(ctx)
	return c, ctx.Err()
}

func (c *chaos) check(what string, err error) {
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.errs = append(c.errs, fmt.Errorf("%s: %w", what, err))
	}
}

func (c *chaos) played(m *model, k faultKind) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.faults[m.name][k.name]++
}

// storm lets clients and faults run. Clients are the last to stop: what the last faults left behind is seen by them.
func (c *chaos) storm(ctx context.Context, length time.Duration, workers int) {
	ctx, stop := context.WithTimeout(ctx, length)
	defer stop()
	faulty, calm := context.WithTimeout(ctx, length*9/10)
	defer calm()
	var all sync.WaitGroup
	for i, m := range c.fleet.models {
		for w := range workers {
			r := rand.New(rand.NewPCG(c.seed, uint64(i*1000+w)))
			all.Go(func() { c.work(ctx, m, r) })
		}
		for b := range 2 { // two faults at a time
			r := rand.New(rand.NewPCG(c.seed+1, uint64(i*1000+b)))
			all.Go(func() { c.check("a fault could not be played", c.play(faulty, m, r)) })
		}
	}
	all.Wait()
}

// work is a client that sends one request after the other.
func (c *chaos) work(ctx context.Context, m *model, r *rand.Rand) {
	for ctx.Err() == nil {
		size := 40 + r.IntN(400)
		if r.IntN(20) == 0 {
			size = 1500 + r.IntN(1500)
		}
		q, leave := newRequest(m, r, size, 4+r.IntN(60)), time.Duration(0)
		if r.IntN(25) == 0 {
			leave = span(r, 5*time.Millisecond, 200*time.Millisecond)
		}
		c.fleet.send(ctx, q, leave, c.tallies[m.name])
		_ = proc.Pause(ctx, span(r, 0, 100*time.Millisecond))
	}
}

// settled waits until each order serves again, with right responses only.
func (c *chaos) settled(ctx context.Context) error {
	begun := time.Now()
	if err := c.fleet.ready(ctx, 20*time.Second); err != nil {
		return err
	}
	var all sync.WaitGroup
	errs := make([]error, len(c.fleet.models))
	for i, m := range c.fleet.models {
		r := rand.New(rand.NewPCG(c.seed+2, uint64(i)))
		all.Go(func() {
			errs[i] = eventually(ctx, soundAgain, m.name+" does not serve", func() error {
				t := newTally()
				for range soundRequests {
					if c.fleet.send(ctx, newRequest(m, r, 300, 8), 0, t) != right {
						return fmt.Errorf("%v %v", t.verdicts, t.codes)
					}
				}
				return nil
			})
			if errs[i] == nil {
				c.mu.Lock()
				defer c.mu.Unlock()
				c.sound[m.name] = time.Since(begun)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

const (
	// idlePause lets the gateway's idle connections end, which it keeps for up to 5 s: they are no leak.
	idlePause = 6 * time.Second
	// slack is how many goroutines and descriptors more than before are no leak: those of a probe that runs just now.
	slack = 4
)

// leaks waits until the gateway and the engines hold nothing any more, and says what they still hold.
func (c *chaos) leaks(ctx context.Context) {
	c.check("the gateway leaks", eventually(ctx, 30*time.Second, "it holds more than before", func() (err error) {
		if c.after, err = c.fleet.gauges(ctx); err != nil {
			return err
		}
		if c.after.sessions > 0 {
			return fmt.Errorf("%d sessions", c.after.sessions)
		}
		return c.after.grown(c.before)
	}))
	for _, m := range c.fleet.models {
		for _, e := range m.engines {
			c.check(e.name, eventually(ctx, 2*lease, "the engine still holds KV or serves", func() error {
				s, err := e.ask(injection{})
				if err == nil && (s.Stats.PinnedBlocks > 0 || s.Stats.Running > 0 || s.Stats.Waiting > 0) {
					err = fmt.Errorf("%d blocks pinned, %d requests run, %d wait", s.Stats.PinnedBlocks,
						s.Stats.Running, s.Stats.Waiting)
				}
				return err
			}))
			for kind, n := range e.total().Breaches {
				// A read that waits in the network while the link is cut reaches P after the lease. Decode has given
				// its request up by then: see lease. What is decided to stay at decode is computed there.
				if (kind != enginesim.KVStaleRead || c.fleet.wire == nil) &&
					(kind != enginesim.KVNoTransfer || !c.fleet.decides) {
					c.check(e.name, fmt.Errorf("KV ledger: %s, %d times", kind, n))
				}
			}
		}
	}
}

// err says whether anything was as it must not be.
func (c *chaos) err() error {
	return errors.Join(append(c.errs, c.tallies.errs(c.fleet)...)...)
}
