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
	"syscall"
	"time"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/lab/internal/apis"
	"github.com/pdkit/pdkit/lab/internal/gateway"
	"github.com/pdkit/pdkit/lab/internal/proc"
)

// streams is a run of many slow streams at a time.
type streams struct {
	fleet    *fleet
	open     int
	tokens   int
	opening  time.Duration
	took     time.Duration
	tally    *tally
	before   gauges
	during   gauges
	after    gauges
	memory   *inMemory
	openFile uint64 // the limit of open files
}

const slowITL = 2 * time.Second

// runStreams opens streams through one gateway process, holds them all open, and compares each with the lone engine's.
// Before that it opens streams in memory, if inMemory is not 0.
func runStreams(ctx context.Context, open, inMemory, tokens int) (_ *streams, err error) {
	s := &streams{open: open, tokens: tokens, tally: newTally()}
	if s.memory, err = measureInMemory(ctx, inMemory); err != nil {
		return nil, err
	}
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return nil, err
	}
	if s.openFile = limit.Max; uint64(2*open+200) > limit.Max {
		return nil, fmt.Errorf("%d streams need %d open files in the gateway's process, and %d are allowed", open,
			2*open+200, limit.Max)
	}
	f, err := openFleet(ctx, fleetOptions{each: 1, retry: 2,
		orders: func(callback string) []*order { return orders(callback)[:1] },
		limits: gateway.Object{"prefill": "60s", "decode": "60s", "idle": "30s"},
		tune: func(_ *order, cfg *enginesim.Config) {
			cfg.PrefillRate, cfg.MaxRunning, cfg.Blocks, cfg.Lease = 0, 1<<16, 1<<17, 30*time.Second
			if cfg.KVRole == enginesim.RoleConsumer {
				cfg.ITL = slowITL
			}
		}})
	if err != nil {
		return nil, err
	}
	defer f.close()
	f.patience = 10 * time.Minute
	s.fleet = f
	return s, s.run(ctx)
}

func (s *streams) run(ctx context.Context) (err error) {
	m := s.fleet.models[0]
	m.apis = []*apis.API{apis.Completions, apis.Chat, apis.Messages, apis.Responses}
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 { // code and pools
		q := newRequest(m, r, 200, 1)
		s.fleet.send(ctx, q, 0, newTally())
	}
	if s.before, err = s.fleet.gauges(ctx); err != nil {
		return err
	}
	begun := time.Now()
	var opened atomic.Int64
	var all sync.WaitGroup
	for range s.open {
		q := newRequest(m, r, 200, s.tokens)
		q.stream, q.opened = true, func() { opened.Add(1) }
		q.write(200, s.tokens)
		all.Go(func() { s.fleet.send(ctx, q, 0, s.tally) })
		if err := proc.Pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
	err = eventually(ctx, time.Duration(s.tokens)*slowITL, "not all streams are open", func() error {
		if n := opened.Load(); n < int64(s.open) {
			return fmt.Errorf("%d of %d", n, s.open)
		}
		return nil
	})
	s.opening = time.Since(begun)
	if err == nil {
		err = proc.Pause(ctx, 2*slowITL)
	}
	if err == nil {
		s.during, err = s.fleet.gauges(ctx)
	}
	all.Wait()
	s.took = time.Since(begun)
	if err != nil {
		return err
	}
	// Idle connections to engines end after 5 s, and what is left then is told.
	_ = eventually(ctx, 30*time.Second, "", func() error {
		if s.after, err = s.fleet.gauges(ctx); err != nil {
			return err
		}
		return s.after.grown(s.before)
	})
	return err
}

func (s *streams) err() error {
	var errs []error
	if n := s.tally.count(right); n != s.open {
		errs = append(errs, fmt.Errorf("%d of %d streams are right: %v %v", n, s.open, s.tally.verdicts, s.tally.codes))
	}
	if s.during.sessions != s.open {
		errs = append(errs, fmt.Errorf("%d sessions at a time in place of %d", s.during.sessions, s.open))
	}
	return errors.Join(append(errs, s.after.grown(s.before))...)
}

func (s *streams) report(w io.Writer) {
	p := printer(w, "Many slow streams", "streams")
	p("%d streams at a time through one gateway process (connector nixl, a token in %s, %d tokens each, four APIs, at "+
		"most %d open files, %d CPUs). All were open after %s, and all had ended after %s. %d of %d are, byte for "+
		"byte of text, those of an engine that serves alone.\n", s.open, slowITL, s.tokens, s.openFile,
		runtime.NumCPU(), s.opening.Round(time.Second), s.took.Round(time.Second), s.tally.count(right), s.open)
	p("| gateway | before | all open | after | each stream |\n|---|---|---|---|---|")
	bytes := func(name string, of func(gauges) int64) {
		p("| %s | %s | %s | %s | %.1f KiB |", name, mib(of(s.before)), mib(of(s.during)), mib(of(s.after)),
			float64(of(s.during)-of(s.before))/1024/float64(s.open))
	}
	counts := func(name string, of func(gauges) int) {
		p("| %s | %d | %d | %d | %.1f |", name, of(s.before), of(s.during), of(s.after),
			float64(of(s.during)-of(s.before))/float64(s.open))
	}
	bytes("resident memory", func(g gauges) int64 { return g.resident })
	bytes("heap in use", func(g gauges) int64 { return g.heap })
	counts("goroutines", func(g gauges) int { return g.goroutines })
	counts("file descriptors", func(g gauges) int { return g.descriptors })
	p("| sessions | %d | %d | %d | |", s.before.sessions, s.during.sessions, s.after.sessions)
	s.memory.report(p)
	must(p, s.err())
}
