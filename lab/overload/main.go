// SPDX-License-Identifier: Apache-2.0

// Command overload offers more and more requests to one pair of engines, with and without admission (package admit),
// and shows what is served: a table, and with -out a plot. Run it from the repository root, on a quiet machine:
//
//	go run ./lab/overload
//
// The flow, its picker and the admission are the real ones, and time is real. The engines are a model (engines.go). The
// package's test runs the same in simulated time, and 60 s of it over HTTP in real time, and writes
// docs/reliability/overload.md and overload.png. It takes 90 s, and wants a quiet machine, too:
//
//	PDKIT_UPDATE=1 go test -run TestOverloadsPage ./overload
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/pdflow/admit"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := command(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "overload:", err)
		os.Exit(1)
	}
}

// loads are the offered loads, as multiples of what the engines can serve.
var loads = []float64{.2, .4, .6, .8, .9, 1, 1.2, 1.5, 2, 2.5, 3}

// point is one offered load, without and with admission.
type point struct {
	load          float64
	without, with *result
}

func command(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("overload", flag.ContinueOnError)
	fs.SetOutput(stderr)
	out := fs.String("out", "", "write overload.md and overload.png into this `FOLDER`; without it, print the table")
	r := run{}
	fs.Float64Var(&r.capacity, "capacity", 80, "requests per second that the engines can serve")
	fs.DurationVar(&r.lasts, "lasts", 20*time.Second, "how long each load is offered")
	fs.DurationVar(&r.decode, "decode", 200*time.Millisecond, "decode's time for one response")
	fs.DurationVar(&r.timeout, "timeout", 2*time.Second, "timeouts.prefill")
	by := fs.String("narrow", string(narrowPrefill), "what bounds the engines: prefill, prompts (they differ in "+
		"length), batch (prefill computes 16 at a time) or decode")
	if err := fs.Parse(args); err != nil {
		return err
	}
	r.by = narrow(*by)
	known := slices.Contains([]narrow{narrowPrefill, narrowPrompts, narrowBatch, narrowDecode}, r.by)
	if !known || fs.NArg() > 0 || r.capacity < 1 || r.lasts < time.Second || r.decode <= 0 || r.timeout <= 0 {
		return errors.New("a flag is out of range; see -help")
	}
	points := make([]point, len(loads))
	for i, load := range loads {
		p, err := both(ctx, r, load)
		if err != nil {
			return err
		}
		points[i] = p
		fmt.Fprintf(stderr, "%.1f of capacity: %.1f/s served, with admission %.1f/s\n", load, p.without.goodput,
			p.with.goodput)
	}
	text := page(r, points, nil, "go run ./lab/overload "+strings.Join(args, " "), "Time is real.")
	if *out == "" {
		_, err := io.WriteString(stdout, text)
		return err
	}
	return errors.Join(os.MkdirAll(*out, 0o750),
		os.WriteFile(filepath.Join(*out, "overload.md"), []byte(text), 0o600),
		drawing(filepath.Join(*out, "overload.png"), r, points))
}

// coldStart is three times the capacity, offered to engines of which nothing is known yet, by clients that give up.
func coldStart(by narrow) run {
	return run{by: by, capacity: 80, load: 3, lasts: 20 * time.Second, decode: 200 * time.Millisecond,
		timeout: 10 * time.Second, patience: 4 * time.Second, limits: &admit.Options{Adaptive: true}}
}

// both measures a load without and with admission, at the same time: each has engines of its own.
func both(ctx context.Context, r run, load float64) (p point, err error) {
	p.load, r.load = load, load
	var errs [2]error
	var wg sync.WaitGroup
	wg.Go(func() { p.without, errs[0] = measure(ctx, r, 1) })
	wg.Go(func() {
		r := r
		r.limits = &admit.Options{Adaptive: true}
		p.with, errs[1] = measure(ctx, r, 1)
	})
	wg.Wait()
	return p, errors.Join(errs[:]...)
}
