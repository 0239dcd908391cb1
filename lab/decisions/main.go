// SPDX-License-Identifier: Apache-2.0

// Command decisions makes docs/decisions.md: when it pays to split a request between a prefill and a decode engine. It
// replays three traces over fleets of eight modelled engines in virtual time, with the gateway's own picker and
// decider: see cmd/pdctl/simulate. It also makes docs/literature.md: what four publications claim, tried in the same
// way. The same code gives the same pages.
//
//	go run ./lab/decisions -o docs
//	go run ./lab/decisions -literature -o docs
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/cmd/pdctl/simulate"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/pick"
)

const requestsUsual = 1500 // of each run

// workload is a trace with its objectives.
type workload struct {
	name, what string
	slo        simulate.SLO
	speeds     [3]float64 // so many times as fast as the trace: a low, a usual and a high load
	make       func() (*simulate.Trace, error)
}

func generated(g simulate.Generated) func() (*simulate.Trace, error) {
	return func() (*simulate.Trace, error) { return g.Trace(1) }
}

var workloads = []workload{
	{"conversation", "Mooncake's trace", simulate.SLO{TTFT: 2 * time.Second, TPOT: 25 * time.Millisecond},
		[3]float64{0.7, 1.2, 1.7}, simulate.Mooncake},
	{"chat", "generated, with system prompts", simulate.SLO{TTFT: time.Second, TPOT: 25 * time.Millisecond},
		[3]float64{0.75, 1.5, 2.25}, generated(simulate.Usual())},
	{"short", "generated, short prompts", simulate.SLO{TTFT: 500 * time.Millisecond, TPOT: 20 * time.Millisecond},
		[3]float64{1, 2, 3}, generated(simulate.Short())},
}

var (
	ratios     = [][2]int{{1, 7}, {2, 6}, {4, 4}, {6, 2}} // prefill and decode engines
	links      = []float64{1.25e9, 6.25e9, 50e9}          // bytes a second: 10, 50 and 400 Gbit/s
	thresholds = []int{512, 2048, 8192}                   // uncached tokens
	loads      = [...]string{"low", "usual", "high"}
)

// cell is one place of the map.
type cell struct {
	w    *workload
	pd   [2]int
	load int
	link float64

	always, never, decider, patient, robust figure // patient is the decider that refuses none
	threshold                               figure // the best one
	best                                    int    // its tokens
}

// figure is what a policy has shown in a cell.
type figure struct {
	good  float64 // share of the requests that met the objectives
	itl   float64 // seconds, p99 over all tokens
	p99   float64 // seconds, of TTFT
	split float64 // share of the requests that were split

	refused float64 // share of the requests
}

// cells are all cells, in the order of the page.
func cells() (all []*cell) {
	for i := range workloads {
		for _, pd := range ratios {
			for load := range loads {
				for _, link := range links {
					all = append(all, &cell{w: &workloads[i], pd: pd, load: load, link: link})
				}
			}
		}
	}
	return all
}

func (c *cell) String() string {
	return fmt.Sprintf("%s %d:%d %s %.0f Gbit/s", c.w.name, c.pd[0], c.pd[1], loads[c.load], c.link*8/1e9)
}

// run fills the cell.
func (c *cell) run(ctx context.Context, requests int) error {
	t, err := c.w.make()
	if err != nil {
		return err
	}
	if err := t.Repeat(requests); err != nil {
		return err
	}
	if err := t.Speed(c.w.speeds[c.load]); err != nil {
		return err
	}
	f := simulate.UsualFleet()
	f.Prefill, f.Decode, f.Zones = c.pd[0], c.pd[1], 1
	f.Link = model.Link{Latency: .001, BytesPerSecond: c.link}
	f.CrossLink = f.Link
	class := decide.Class{TTFT: c.w.slo.TTFT, ITL: c.w.slo.TPOT, Refusable: true}
	try := func(to *figure, d simulate.Deciding) error {
		d.Pick, d.Class = pick.PrefixAffinity(), cmp.Or(d.Class, class)
		r, err := simulate.Decide(ctx, f, t, d, 1)
		if err != nil {
			return err
		}
		*to = figure{good: r.Goodput(c.w.slo) * r.Lasted / float64(requests), itl: r.ITLP99, p99: r.TTFTP99(),
			split: float64(r.Split) / float64(requests), refused: float64(r.Refused) / float64(requests)}
		return nil
	}
	decider := decide.Predicted(decide.PredictedOptions{Chunk: f.DecodeSpec.StepTokens})
	for _, x := range []struct {
		to *figure
		d  simulate.Deciding
	}{
		{&c.always, simulate.Deciding{Policy: decide.Always()}},
		{&c.never, simulate.Deciding{Policy: decide.Never()}},
		{&c.decider, simulate.Deciding{Policy: decider}},
		{&c.patient, simulate.Deciding{Policy: decider, Class: decide.Class{TTFT: class.TTFT, ITL: class.ITL}}},
		{&c.robust, simulate.Deciding{Policy: decider, Gateways: 2, Lag: time.Second, Wrong: 0.5}},
	} {
		if err := try(x.to, x.d); err != nil {
			return err
		}
	}
	for _, tokens := range thresholds {
		var x figure
		policy := decide.Chain(decide.Threshold(tokens, 0), decide.Always())
		if err := try(&x, simulate.Deciding{Policy: policy}); err != nil {
			return err
		}
		if c.best == 0 || x.good > c.threshold.good {
			c.best, c.threshold = tokens, x
		}
	}
	return nil
}

// rival is the best of the three others.
func (c *cell) rival() float64 { return max(c.always.good, c.never.good, c.threshold.good) }

func main() {
	log.SetFlags(0)
	folder := flag.String("o", "", "write the pages and their plots to this folder")
	requests := flag.Int("requests", requestsUsual, "of each run")
	only := flag.String("only", "", "only the cells of this workload")
	every := flag.Int("every", 1, "only each nth cell")
	pages := flag.String("pages", "decisions,herding,literature", "of these, which")
	flag.Parse()
	ctx := context.Background()
	for name := range strings.SplitSeq(*pages, ",") {
		var err error
		switch name {
		case "decisions":
			err = decisions(ctx, *folder, *only, *every, *requests)
		case "herding":
			err = herding(ctx, *folder)
		case "literature":
			err = writeLiterature(ctx, *folder)
		default:
			err = fmt.Errorf("there is no page %q", name)
		}
		if err != nil {
			log.Fatal(err)
		}
	}
}

// write writes a page to the folder, or prints it.
func write(folder, name, page string) error {
	if folder == "" {
		fmt.Print(page)
		return nil
	}
	return os.WriteFile(filepath.Join(folder, name), []byte(page), 0o600)
}

// decisions makes the map, or a part of it.
func decisions(ctx context.Context, folder, only string, every, requests int) error {
	all := cells()
	if only != "" {
		all = slices.DeleteFunc(all, func(c *cell) bool { return c.w.name != only })
	}
	n := 0
	all = slices.DeleteFunc(all, func(*cell) bool { n++; return (n-1)%every != 0 })
	err := errors.Join(runAll(ctx, all, requests), write(folder, "decisions.md", page(all, requests)))
	if err != nil || folder == "" {
		return err
	}
	return picture(filepath.Join(folder, "decisions.png"), all)
}

// runAll fills all cells, as many at a time as there are processors.
func runAll(ctx context.Context, all []*cell, requests int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan *cell)
	var working sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		working.Go(func() {
			for c := range next {
				if err := c.run(ctx, requests); err != nil {
					cancel(fmt.Errorf("%s: %w", c, err))
				}
			}
		})
	}
	for _, c := range all {
		next <- c
	}
	close(next)
	working.Wait()
	return context.Cause(ctx)
}
