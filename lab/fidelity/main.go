// SPDX-License-Identifier: Apache-2.0

// Command fidelity compares a simulation in virtual time with the same engines, requests and policy in real time: a
// flow sends the requests over HTTP to simulated engines that take the model's time (enginesim.Config.Timing). It
// writes the table of docs/simulation.md. Run it from the repository root, on a quiet machine; each round of each
// policy takes some minutes:
//
//	go run ./lab/fidelity
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	"github.com/pdkit/pdkit/pdflow/pick"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := command(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "fidelity:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("fidelity", flag.ContinueOnError)
	requests := fs.Int("requests", 2000, "of each round")
	rate := fs.Float64("rate", 12, "requests a second")
	rounds := fs.Int("rounds", 5, "each with arrivals of its own")
	policies := fs.String("policies", "round-robin,two-choices,prefix", "comma separated")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *requests < 1 || *rounds < 1 || *rate <= 0 || fs.NArg() > 0 {
		return errors.New("a flag is out of range")
	}
	fmt.Fprintf(out, "%d requests a round, %g a second; 2 prefill and 2 decode engines\n\n%s", *requests, *rate, head)
	for name := range strings.SplitSeq(*policies, ",") {
		policy, err := pick.ParsePolicy(name)
		if err != nil {
			return err
		}
		for round := range *rounds {
			load := newLoad(uint64(round+1), *requests, *rate)
			c, err := compare(ctx, policy, load, uint64(round+1))
			if err != nil {
				return err
			}
			fmt.Fprint(out, c.row(name, round+1))
		}
	}
	return nil
}

// compare runs a load in virtual time and in real time.
func compare(ctx context.Context, policy pick.Policy, load []request, seed uint64) (*comparison, error) {
	virtual, err := inVirtualTime(ctx, policy, load, seed)
	if err != nil {
		return nil, err
	}
	actual, err := inRealTime(ctx, policy, load, seed)
	if err != nil {
		return nil, err
	}
	return &comparison{virtual, actual}, nil
}
