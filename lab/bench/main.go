// SPDX-License-Identifier: Apache-2.0

// Command bench measures what cmd/gateway costs, against a minimal PD proxy on the same machine at the same
// time, and prints the table as Markdown. Run it from the repository root: go run ./lab/bench. How it
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
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

func main() {
	out := flag.String("o", "", "write the table to this file too, and plots beside it: x.md, x-requests.png and so on")
	quick := flag.Bool("quick", false, "under a minute; fails when a figure is beyond 2.5 times its target")
	selfcheck := flag.Bool("selfcheck", false, "test the benchmark itself: compare minimal with minimal, and with a "+
		"variant that burns a known time for each request")
	only := flag.String("only", "", "run only the scenarios whose name contains this")
	peersDir := flag.String("peers", "", "folder of other gateways to be measured, too: "+
		"where peers/install.sh has installed them, .tools/peers")
	before := flag.String("before", "", "a gateway's program: in minimal's place, to see what a change costs")
	flag.Parse()

	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	pace := full
	if *quick {
		pace = short
	}
	if err := run(ctx, pace, *selfcheck, *peersDir, *only, *before, *out); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// run runs the whole benchmark. It returns an error that says why the result is bad, or why there is none.
func run(ctx context.Context, p pace, selfcheck bool, peersDir, only, before, out string) (err error) {
	start := time.Now()
	if selfcheck && peersDir+before != "" {
		return errors.New("-selfcheck compares minimal with itself: leave -peers and -before out")
	}
	peers, err := findPeers(peersDir)
	if err != nil {
		return err
	}
	l, err := openLab(ctx, p, os.Stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()

	var r *report
	if selfcheck {
		r, err = l.checkItself(ctx, only)
	} else {
		r, err = l.measureAll(ctx, peers, only, before)
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
		if err := r.draw(strings.TrimSuffix(out, filepath.Ext(out))); err != nil {
			return err
		}
	}
	if err := r.write(to); err != nil {
		return err
	}
	return r.verdict(p)
}
