// SPDX-License-Identifier: Apache-2.0

// Command bench measures what examples/gateway costs, against a minimal PD proxy on the same machine at the same
// time, and prints the table as Markdown. Run it from the repository root: go run ./examples/bench. How it
// measures is in README.md beside it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	out := flag.String("o", "", "write the table to this file too")
	quick := flag.Bool("quick", false, "under a minute; fails when a figure is beyond twice its target")
	selfcheck := flag.Bool("selfcheck", false, "measure the benchmark itself: minimal against minimal, and against a "+
		"minimal made dearer by a known time")
	only := flag.String("only", "", "run only the scenarios whose name contains this")
	flag.Parse()

	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	pace := full
	if *quick {
		pace = short
	}
	if err := run(ctx, pace, *selfcheck, *only, *out); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// run does the whole benchmark; its error says what makes the result bad.
func run(ctx context.Context, p pace, selfcheck bool, only, out string) (err error) {
	start := time.Now()
	l, err := openLab(ctx, p, os.Stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()

	var r *report
	if selfcheck {
		r, err = l.checkItself(ctx, only)
	} else {
		r, err = l.measureAll(ctx, only)
	}
	if err != nil {
		return err
	}
	r.took = time.Since(start)
	var to io.Writer = os.Stdout
	if out != "" {
		file, err := os.Create(out)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		to = io.MultiWriter(os.Stdout, file)
	}
	if err := r.write(to); err != nil {
		return err
	}
	return r.verdict(p)
}
