// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/examples/bench/internal/cpu"
	"github.com/pdkit/pdkit/examples/bench/internal/load"
)

// footprint is what a program holds at rest and for each open stream.
type footprint struct {
	name      string
	atRest    int64 // bytes in RAM after a little work
	perStream int64 // bytes that each open stream adds
}

// footprint reads a fresh process's memory before and while many streams are open. The streams are opened within
// a second or two, and read when they have run for a while: garbage that the process has not collected by then
// belongs to what it costs its operator, and is counted.
func (l *lab) footprint(ctx context.Context, r recipe) (footprint, error) {
	f := footprint{name: r.name}
	p, _, err := l.start(ctx, r)
	if err != nil {
		return f, err
	}
	if err := l.warm(ctx, p); err != nil {
		return f, err
	}
	before, err := cpu.Resident(p.cmd.Process.Pid)
	if err != nil {
		return f, err
	}
	var stop atomic.Bool
	streams := scenario{size: 2 << 10, stream: true, perWrite: 1, interval: time.Second}
	crowd := l.crowd(streams, p, streamsOpen, &load.Meter{}, &stop)
	defer crowd.end()
	const step = 50
	for from := 0; from < streamsOpen; from += step {
		crowd.begin(from, from+step)
		if err := rest(ctx, 50*time.Millisecond); err != nil {
			return f, err
		}
	}
	if err := crowd.waitOpen(ctx, streamsOpen); err != nil {
		return f, err
	}
	if err := rest(ctx, l.pace.settle); err != nil {
		return f, err
	}
	after, err := cpu.Resident(p.cmd.Process.Pid)
	if err != nil {
		return f, err
	}
	crowd.end()
	l.board.Settle()
	f.atRest, f.perStream = before, (after-before)/streamsOpen
	l.say("%s: %d KB at rest, %.1f KB per open stream", f.name, f.atRest>>10, float64(f.perStream)/1024)
	return f, p.stop()
}

// warm brings a fresh program to the state that it keeps: code paged in, pools filled.
func (l *lab) warm(ctx context.Context, p *program) error {
	var stop atomic.Bool
	crowd := l.crowd(scenario{size: 2 << 10, stream: true, perWrite: 1, chunks: 10}, p, 4, &load.Meter{}, &stop)
	defer crowd.end()
	crowd.begin(0, 4)
	if err := rest(ctx, 500*time.Millisecond); err != nil {
		return err
	}
	crowd.end()
	return rest(ctx, time.Second)
}

// starts is how long a program needed from exec to its first answer, each time.
type starts struct {
	name  string
	times []time.Duration
}

func (l *lab) starts(ctx context.Context, r recipe) (starts, error) {
	s := starts{name: r.name}
	for range l.pace.starts {
		p, took, err := l.start(ctx, r)
		if err != nil {
			return s, err
		}
		s.times = append(s.times, took)
		if err := p.stop(); err != nil {
			return s, err
		}
	}
	l.board.Settle()
	return s, nil
}
