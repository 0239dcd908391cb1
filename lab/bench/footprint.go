// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/lab/bench/internal/cpu"
	"github.com/pdkit/pdkit/lab/bench/internal/load"
	"github.com/pdkit/pdkit/lab/internal/proc"
)

// footprint lists a program's resident memory in bytes: one figure for each process that was started for it.
type footprint struct {
	name      string
	atRest    []float64       // after a little work
	perStream []float64       // added by each open stream
	started   []time.Duration // from exec to the first response
	why       string          // there are no figures
}

// footprint sets Go's own target for garbage, GOGC=100: the gateway's default has a floor under the heap, which is
// there at rest and which streams then use, so that the difference would say nothing.
func (l *lab) footprint(ctx context.Context, r recipe) (footprint, error) {
	f := footprint{name: r.name}
	r.env = append(r.env, "GOGC=100")
	for range l.pace.memory {
		if err := l.look(ctx, r, &f); err != nil {
			return f, err
		}
	}
	l.say("%s: %.0f KB at rest, %.1f KB per open stream", f.name, median(f.atRest)/1024, median(f.perStream)/1024)
	return f, nil
}

// look starts a process, reads its memory, opens many streams within a second or two, lets them run for a while, and
// reads the memory again. Garbage that the process has not collected by then is counted: its operator pays for it, too.
func (l *lab) look(ctx context.Context, r recipe, f *footprint) error {
	p, took, err := l.start(ctx, r)
	if err != nil {
		return err
	}
	f.started = append(f.started, took)
	if err := l.warm(ctx, p); err != nil {
		return err
	}
	before, err := cpu.ResidentOfTree(p.Cmd.Process.Pid)
	if err != nil {
		return err
	}
	var stop atomic.Bool
	streams := scenario{size: 2 << 10, stream: true, perWrite: 1, interval: time.Second}
	crowd := l.crowd(streams, p, streamsOpen, &load.Meter{}, &stop)
	defer crowd.end()
	if err := crowd.open(ctx); err != nil {
		return err
	}
	if err := proc.Pause(ctx, l.pace.settle); err != nil {
		return err
	}
	after, err := cpu.ResidentOfTree(p.Cmd.Process.Pid)
	if err != nil {
		return err
	}
	crowd.end()
	r.site.board.Settle()
	f.atRest = append(f.atRest, float64(before))
	f.perStream = append(f.perStream, float64(after-before)/streamsOpen)
	return p.stop()
}

// warm sends some requests to a new process, so that its code is paged in and its pools are filled.
func (l *lab) warm(ctx context.Context, p *program) error {
	var stop atomic.Bool
	crowd := l.crowd(scenario{size: 2 << 10, stream: true, perWrite: 1, chunks: 10}, p, 4, &load.Meter{}, &stop)
	defer crowd.end()
	crowd.begin(ctx, 0, 4)
	if err := proc.Pause(ctx, 500*time.Millisecond); err != nil {
		return err
	}
	crowd.end()
	return proc.Pause(ctx, time.Second)
}

// starts measures several times how long a program needs from exec to its first response.
func (l *lab) starts(ctx context.Context, r recipe) (times []time.Duration, err error) {
	for range l.pace.starts {
		p, took, err := l.start(ctx, r)
		if err != nil {
			return nil, err
		}
		times = append(times, took)
		if err := p.stop(); err != nil {
			return nil, err
		}
	}
	l.board.Settle()
	return times, nil
}
