// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"

	"github.com/pdkit/pdkit/examples/bench/internal/cpu"
	"github.com/pdkit/pdkit/examples/bench/internal/load"
)

const (
	gatewayPackage = "github.com/pdkit/pdkit/examples/gateway"
	minimalPackage = "github.com/pdkit/pdkit/examples/bench/minimal"
)

// lab is the machine set up: programs under test go to one CPU, clients and engines (this process) to another.
type lab struct {
	pace     pace
	progress io.Writer
	dir      string
	theirs   int // CPU of the programs under test
	ours     int // CPU of clients and engines
	board    *load.Board
	engines  *load.Engines
	running  []*program
}

func openLab(ctx context.Context, p pace, progress io.Writer) (*lab, error) {
	cpus, err := cpu.Allowed()
	if err != nil {
		return nil, err
	}
	if len(cpus) < 2 {
		return nil, errors.New("two CPUs are needed: one for the program under test, one for clients and engines")
	}
	l := &lab{pace: p, progress: progress, theirs: cpus[0], ours: cpus[1], board: load.NewBoard()}
	if l.dir, err = os.MkdirTemp("", "pdkit-bench-"); err != nil {
		return nil, err
	}
	if l.engines, err = load.StartEngines(ctx, l.board, 1); err != nil {
		return nil, errors.Join(err, l.close())
	}
	return l, nil
}

// pin is called when everything is built: compilers may have all CPUs.
func (l *lab) pin() error {
	runtime.GOMAXPROCS(1)
	// This process makes little garbage on a heap of a few MB; collecting it seldom leaves its CPU to the load.
	debug.SetGCPercent(800)
	return cpu.PinSelf(l.ours)
}

func (l *lab) close() error {
	var errs []error
	for _, p := range l.running {
		errs = append(errs, p.stop())
	}
	if l.engines != nil {
		l.engines.Close()
	}
	return errors.Join(append(errs, os.RemoveAll(l.dir))...)
}

func (l *lab) say(format string, args ...any) {
	// Progress that nobody can read changes nothing about the measurement.
	_, _ = fmt.Fprintf(l.progress, format+"\n", args...)
}

// build compiles a program of this repository.
func (l *lab) build(ctx context.Context, pkg string) (string, error) {
	binary := filepath.Join(l.dir, filepath.Base(pkg))
	cmd := exec.CommandContext(ctx, "go", "build", "-o", binary, pkg)
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", pkg, err, text)
	}
	return binary, nil
}

// target is where clients reach a program; the direct one for nil.
func (l *lab) target(p *program) load.Target {
	if p == nil {
		return load.Target{Prefill: l.engines.Prefill[0], Decode: l.engines.Decode[0]}
	}
	return load.Target{Proxy: p.address}
}
