// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/pdkit/pdkit/lab/bench/internal/cpu"
	"github.com/pdkit/pdkit/lab/bench/internal/load"
)

const minimalPackage = "github.com/pdkit/pdkit/lab/bench/minimal"

// lab runs the programs under test on one CPU, and clients and engines (this process) on another.
type lab struct {
	pace     pace
	progress io.Writer
	dir      string
	theirs   int    // CPU of the programs under test
	ours     int    // CPU of clients and engines
	site            // for pdkit's own programs, whose legs must be right byte for byte
	sites    []site // for peers
	running  []*program
}

// site is a board and the two engines behind a program.
type site struct {
	board   *load.Board
	engines *load.Engines
}

func openLab(ctx context.Context, p pace, progress io.Writer) (*lab, error) {
	cpus, err := cpu.Allowed()
	if err != nil {
		return nil, err
	}
	if len(cpus) < 2 {
		return nil, errors.New("two CPUs are needed: one for the program under test, one for clients and engines")
	}
	l := &lab{pace: p, progress: progress, theirs: cpus[0], ours: cpus[1]}
	if l.dir, err = os.MkdirTemp("", "pdkit-bench-"); err != nil {
		return nil, err
	}
	if l.site, err = openSite(ctx, load.NewBoard()); err != nil {
		return nil, errors.Join(err, l.close())
	}
	return l, nil
}

func openSite(ctx context.Context, board *load.Board) (site, error) {
	engines, err := load.StartEngines(ctx, board, 1)
	return site{board: board, engines: engines}, err
}

// siteForPeer has engines that compare legs by meaning, and faults that are not counted as pdkit's.
func (l *lab) siteForPeer(ctx context.Context) (site, error) {
	s, err := openSite(ctx, load.NewBoardByMeaning())
	if err == nil {
		l.sites = append(l.sites, s)
	}
	return s, err
}

// pin moves this process to its CPU. It is called after everything is built, since compilers may use all CPUs.
func (l *lab) pin() error {
	runtime.GOMAXPROCS(1)
	// This process makes little garbage on a heap of a few MB. If it collects seldom, the load has more of its CPU.
	debug.SetGCPercent(800)
	return cpu.PinSelf(l.ours)
}

func (l *lab) close() error {
	var errs []error
	for _, p := range l.running {
		errs = append(errs, p.stop())
	}
	for _, s := range append(l.sites, l.site) {
		if s.engines != nil {
			s.engines.Close()
		}
	}
	return errors.Join(append(errs, os.RemoveAll(l.dir))...)
}

func (l *lab) say(format string, args ...any) {
	// An error in writing the progress does not change the measurement, so it is ignored.
	_, _ = fmt.Fprintf(l.progress, format+"\n", args...)
}

// siteOf returns the site that a program's clients belong to. Direct legs, whose program is nil, are pdkit's own.
func (l *lab) siteOf(p *program) site {
	if p == nil {
		return l.site
	}
	return p.site
}

// target is where clients send their requests: to the program or, if it is nil, to the engines themselves.
func (l *lab) target(p *program) load.Target {
	if p == nil {
		return load.Target{Prefill: l.engines.Prefill[0], Decode: l.engines.Decode[0]}
	}
	return load.Target{Proxy: p.address}
}
