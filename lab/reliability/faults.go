// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/lab/internal/proc"
)

// faultKind is a fault that can be played at the engines of one order. It ends by itself, with all as it was.
type faultKind struct {
	name string
	what string // for the report
	wire bool   // needs a wire
	only string // one order, "" is all
	play func(ctx context.Context, c *chaos, m *model, r *rand.Rand) error
}

// span is a random time between two.
func span(r *rand.Rand, from, to time.Duration) time.Duration {
	return from + time.Duration(r.Int64N(int64(to-from)))
}

// take takes an engine at which no other fault is played, nil if there is none.
func take(m *model, r *rand.Rand, roles ...string) *engine {
	for _, i := range r.Perm(len(m.engines)) {
		if e := m.engines[i]; slices.Contains(roles, e.role) && e.faults.TryLock() {
			return e
		}
	}
	return nil
}

// ended plays a fault that ends an engine and starts it again: with a new engine id, at new ports if it moves.
func ended(sig syscall.Signal, moves bool) func(context.Context, *chaos, *model, *rand.Rand) error {
	return func(ctx context.Context, c *chaos, m *model, r *rand.Rand) error {
		e := take(m, r, prefill, decode)
		if e == nil {
			return errBusy
		}
		defer e.faults.Unlock()
		if sig == syscall.SIGTERM {
			m.terminated.Store(time.Now().Add(time.Second).UnixNano()) // it goes on for a moment
		}
		e.end(sig)
		_ = proc.Pause(ctx, span(r, 200*time.Millisecond, 2500*time.Millisecond))
		if moves {
			e.config = m.engineConfig(e.role, ipOf(e.config.Listen), m.dir, e.lives)
		}
		if m.store {
			m.flaps.Lock() // an engine whose folder is away does not start
			defer m.flaps.Unlock()
		}
		if err := e.start(); err != nil {
			return err
		}
		return m.list(m.engines)
	}
}

func frozen(ctx context.Context, _ *chaos, m *model, r *rand.Rand) error {
	e := take(m, r, prefill, decode)
	if e == nil {
		return errBusy
	}
	defer e.faults.Unlock()
	e.signal(syscall.SIGSTOP)
	_ = proc.Pause(ctx, span(r, 500*time.Millisecond, 7*time.Second))
	e.signal(syscall.SIGCONT)
	return nil
}

// linked plays a rule between an engine and others: the gateway, or the other role's engines.
func linked(kv bool, from, to time.Duration, rules func(*rand.Rand) rule) func(context.Context, *chaos, *model,
	*rand.Rand) error {
	return func(ctx context.Context, c *chaos, m *model, r *rand.Rand) error {
		e := take(m, r, prefill, decode)
		if e == nil {
			return errBusy
		}
		defer e.faults.Unlock()
		apply := func(change rule) {
			if !kv {
				c.fleet.wire.between(c.gateway, e.addr(), change)
				return
			}
			for _, other := range m.engines {
				if other.role != e.role {
					c.fleet.wire.between(e.addr(), other.addr(), change)
				}
			}
		}
		apply(rules(r))
		_ = proc.Pause(ctx, span(r, from, to))
		apply(rule{})
		return nil
	}
}

func flapping(ctx context.Context, _ *chaos, m *model, r *rand.Rand) error {
	if !m.flaps.TryLock() {
		return errBusy
	}
	defer m.flaps.Unlock()
	until := time.Now().Add(span(r, 2*time.Second, 5*time.Second))
	for time.Now().Before(until) && ctx.Err() == nil {
		var err error
		switch r.IntN(6) {
		case 0: // a file that somebody is in the middle of writing
			err = m.write("endpoints:\n  - {url: \"http://10.77")
		case 1:
			err = m.list(nil)
		default:
			gone := r.IntN(len(m.engines))
			err = m.list(slices.Delete(slices.Clone(m.engines), gone, gone+1))
		}
		if err != nil {
			return err
		}
		_ = proc.Pause(ctx, span(r, 60*time.Millisecond, 500*time.Millisecond))
	}
	return m.list(m.engines)
}

// exhausted asks for more KV at once than all decode engines of an order have, through the gateway.
func exhausted(ctx context.Context, c *chaos, m *model, r *rand.Rand) error {
	var all sync.WaitGroup
	for range 40 {
		q := newRequest(m, r, 1200, 300)
		all.Go(func() { c.fleet.send(ctx, q, 0, c.tallies[m.name]) })
	}
	all.Wait()
	return nil
}

// left lets clients leave while an engine computes.
func leavers(ctx context.Context, c *chaos, m *model, r *rand.Rand) error {
	var all sync.WaitGroup
	for range 20 {
		q, leave := newRequest(m, r, 3000, 50), span(r, time.Millisecond, 150*time.Millisecond)
		all.Go(func() { c.fleet.send(ctx, q, leave, c.tallies[m.name]) })
	}
	all.Wait()
	return nil
}

// storeGone takes the engines' folder away and gives it back: reads and writes fail meanwhile.
func storeGone(ctx context.Context, _ *chaos, m *model, r *rand.Rand) error {
	if !m.flaps.TryLock() {
		return errBusy
	}
	defer m.flaps.Unlock()
	store := filepath.Join(m.dir, "store")
	if err := os.Rename(store, store+".away"); err != nil {
		return err
	}
	if err := os.WriteFile(store, nil, 0o600); err != nil { // so that no engine can make it anew
		return err
	}
	_ = proc.Pause(ctx, span(r, time.Second, 5*time.Second))
	return errors.Join(os.Remove(store), os.Rename(store+".away", store))
}

// storeTorn cuts files of the store in half while engines look for them, as a full or failing disk does. The half takes
// the file's place. A file that is truncated while an engine reads it can come whole, with zeros in it, on Linux: then
// the text is wrong, and nobody between the engines can know.
func storeTorn(ctx context.Context, _ *chaos, m *model, r *rand.Rand) error {
	if !m.flaps.TryLock() {
		return errBusy
	}
	defer m.flaps.Unlock()
	store := filepath.Join(m.dir, "store")
	until := time.Now().Add(span(r, time.Second, 4*time.Second))
	for time.Now().Before(until) && proc.Pause(ctx, time.Millisecond) == nil {
		files, err := os.ReadDir(store)
		if err != nil {
			return err
		}
		for _, file := range files {
			info, err := file.Info()
			if err != nil || time.Since(info.ModTime()) > 100*time.Millisecond || filepath.Ext(file.Name()) != ".kv" {
				continue // gone, torn before, or not yet whole
			}
			path, half := filepath.Join(store, file.Name()), filepath.Join(m.dir, "half")
			data, err := os.ReadFile(path)
			if err == nil {
				err = os.WriteFile(half, data[:len(data)/2], 0o600)
			}
			if err == nil {
				err = os.Chtimes(half, time.Time{}, time.Unix(0, 0))
			}
			if err == nil {
				_ = os.Rename(half, path)
			}
		}
	}
	return nil
}

var errBusy = errors.New("other faults are played there")

var faultKinds = []faultKind{
	{name: "killed", what: "SIGKILL, and a new process with a new engine id 0.2 to 2.5 s later",
		play: ended(syscall.SIGKILL, false)},
	{name: "moved", what: "SIGKILL, and a new process with a new engine id at another address",
		play: ended(syscall.SIGKILL, true)},
	{name: "terminated", what: "SIGTERM while it serves: its streams end with `abort`",
		play: ended(syscall.SIGTERM, false)},
	{name: "frozen", what: "SIGSTOP for 0.5 to 7 s", play: frozen},
	{name: "P–D link cut", wire: true,
		what: "no packet between an engine and those of the other role for 1 to 7 s, while all serve HTTP",
		play: linked(true, time.Second, 7*time.Second, func(*rand.Rand) rule { return rule{cut: true} })},
	{name: "partitioned", what: "no packet between the gateway and an engine for 0.5 to 6 s", wire: true,
		play: linked(false, 500*time.Millisecond, 6*time.Second, func(*rand.Rand) rule { return rule{cut: true} })},
	{name: "packets lost", what: "5 to 25 % of the packets between the gateway and an engine", wire: true,
		play: linked(false, time.Second, 6*time.Second, func(r *rand.Rand) rule {
			return rule{lose: 0.05 + 0.2*r.Float64()}
		})},
	{name: "packets delayed and reordered", what: "each 5 to 60 ms late, and up to 40 ms more by chance", wire: true,
		play: linked(false, time.Second, 6*time.Second, func(r *rand.Rand) rule {
			return rule{delay: span(r, 5*time.Millisecond, 60*time.Millisecond), jitter: 40 * time.Millisecond}
		})},
	{name: "KV packets lost and reordered", what: "the same between P and D, with 2 to 10 % lost", wire: true,
		play: linked(true, time.Second, 6*time.Second, func(r *rand.Rand) rule {
			return rule{lose: 0.02 + 0.08*r.Float64(), delay: time.Millisecond, jitter: 20 * time.Millisecond}
		})},
	{name: "discovery flapping", what: "the list loses an engine, all engines, or its syntax, every 60 to 500 ms",
		play: flapping},
	{name: "KV exhausted", what: "40 requests at once, more than decode has blocks for", play: exhausted},
	{name: "clients leaving", what: "20 clients leave 1 to 150 ms after they asked", play: leavers},
	{name: "store gone", what: "the engines' folder is away for 1 to 5 s", only: "sharedstorage", play: storeGone},
	{name: "store torn", what: "files are cut in half as soon as they are there", only: "sharedstorage",
		play: storeTorn},
}

// kinds are the faults that can be played at an order.
func (c *chaos) kinds(m *model) []faultKind {
	return slices.DeleteFunc(slices.Clone(faultKinds), func(k faultKind) bool {
		return k.wire && c.fleet.wire == nil || k.only != "" && k.only != m.name
	})
}

// play plays faults at an order, one after the other, until ctx ends. Each kind comes once before any comes again.
func (c *chaos) play(ctx context.Context, m *model, r *rand.Rand) error {
	kinds := c.kinds(m)
	for {
		r.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
		for _, k := range kinds {
			if proc.Pause(ctx, span(r, 100*time.Millisecond, time.Second)) != nil {
				return nil //nolint:nilerr // the end of the run
			}
			switch err := k.play(ctx, c, m, r); {
			case errors.Is(err, errBusy):
			case err != nil:
				return fmt.Errorf("%s: %s: %w", m.name, k.name, err)
			default:
				c.played(m, k)
			}
		}
	}
}
