// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/pdkit/pdkit/lab/bench/internal/load"
)

// contender is a peer in this run. Whatever it does wrong is shown in the report and does not end the run.
type contender struct {
	recipe  recipe
	fleet   func(s site) recipe
	program *program // nil: it does not run
}

// contenders opens a site for each peer.
func (l *lab) contenders(ctx context.Context, peers []peer) ([]*contender, error) {
	var list []*contender
	for _, p := range peers {
		s, err := l.siteForPeer(ctx)
		if err != nil {
			return nil, err
		}
		list = append(list, &contender{recipe: p.recipe(s), fleet: p.recipe})
	}
	return list, nil
}

// ensure starts a contender that does not run, or no more, and begins a series for it.
func (l *lab) ensure(ctx context.Context, c *contender) series {
	s := series{name: c.recipe.name}
	if c.program != nil && !c.program.Ended() {
		return s
	}
	var err error
	c.program, _, err = l.start(ctx, c.recipe)
	c.recipe.site.board.TakeFaults() // of requests that came before it was ready
	if err != nil {
		s.why = "does not start: " + firstLine(err)
		l.say("%v", err)
	}
	return s
}

// takePeer takes one slice of a contender. Wrong responses are counted. A slice that could not be measured is the
// series' last.
func (l *lab) takePeer(ctx context.Context, s scenario, c *contender, to *series) error {
	if to.why != "" {
		return nil
	}
	got, err := l.slice(ctx, s, c.program)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	to.add(got, c.recipe.site.board)
	switch {
	case err != nil && c.program.EndsWithin(time.Second), c.program.Ended():
		// a connection to it, or its CPU time, tells of its end a moment earlier
		to.why = fmt.Sprintf("ended: %v", c.program.Cmd.ProcessState)
	case err != nil:
		to.why = firstLine(err)
	default:
		to.slices = append(to.slices, got)
	}
	if to.why != "" {
		l.say("%s, %s: %s%s", s.name, to.name, to.why, c.program.lastWords())
	}
	return nil
}

// add counts a slice's requests, and takes its faults from the board.
func (s *series) add(got slice, board *load.Board) {
	faults, n := board.TakeFaults()
	s.asked += got.asked
	s.failed += got.failed
	if got.failed == 0 {
		// All clients have right responses, but engines saw something else: for example a second prefill leg.
		s.failed += int64(n)
	}
	if s.reason == "" && n > 0 {
		s.reason = faults[0]
	}
}

// peerFleet compares a contender that has n endpoints with itself at two.
func (l *lab) peerFleet(ctx context.Context, s scenario, two *contender, n int) (rival, error) {
	var r rival
	engines, err := load.StartEngines(ctx, two.recipe.site.board, n/2)
	if err != nil {
		return r, err
	}
	defer engines.Close()
	many := &contender{recipe: two.fleet(site{board: two.recipe.site.board, engines: engines})}
	base := l.ensure(ctx, two)
	r.series = l.ensure(ctx, many)
	if many.program != nil {
		defer func() { _ = many.program.stop() }() // its figures are there
	}
	err = l.thereAndBack(s, []func() error{
		func() error { return l.takePeer(ctx, s, many, &r.series) },
		func() error { return l.takePeer(ctx, s, two, &base) },
	})
	if r.why == "" && base.why != "" {
		r.why = "with two endpoints: " + base.why
	}
	if r.why == "" {
		r.ratios = ratiosTo(base, r.series)
	}
	l.say("%-50s %s: %s", s.name, r.name, r.cell())
	return r, err
}

// peerFootprint measures a contender's memory and start.
func (l *lab) peerFootprint(ctx context.Context, c *contender) footprint {
	f, err := l.footprint(ctx, c.recipe)
	faults, n := c.recipe.site.board.TakeFaults()
	switch {
	case err != nil:
		f.why = firstLine(err)
		l.say("%v", err)
	case n > 0:
		f.why = fmt.Sprintf("%d faults: %s", n, faults[0])
	}
	return f
}

// firstLine leaves a program's log out of an error.
func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
