// SPDX-License-Identifier: Apache-2.0

// Command fidelity compares a simulation in virtual time with the same engines, requests and policy in real time, and
// writes the tables of docs/simulation.md. Run it from the repository root, on a quiet machine.
//
// A flow sends the requests over HTTP to simulated engines that take the model's time (enginesim.Config.Timing). Each
// round of each policy takes some minutes:
//
//	go run ./lab/fidelity
//
// With two real engines, it first measures how long their steps take. docs/simulation.md has the engines' command:
//
//	go run ./lab/fidelity -engines P_URL,D_URL -model tiny -rate 0.6 -requests 80 -rounds 3
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/lab/internal/paced"
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

// plan is what is run.
type plan struct {
	requests, rounds int
	rate             float64
	policies         []string
	objectives       objectives

	engines []string   // URLs of real ones; nil for simulated ones
	model   string     // their name of it
	limits  model.Spec // what they do not tell
	times   int        // that each thing is measured
}

func command(ctx context.Context, args []string, out io.Writer) error {
	const usual = "round-robin,two-choices,prefix"
	p := plan{limits: model.Spec{BlockSize: 1}}
	fs := flag.NewFlagSet("fidelity", flag.ContinueOnError)
	fs.IntVar(&p.requests, "requests", 2000, "of each round")
	fs.Float64Var(&p.rate, "rate", 12, "requests a second")
	fs.IntVar(&p.rounds, "rounds", 5, "each with arrivals of its own")
	policies := fs.String("policies", "", "comma separated (default "+usual+"; with -engines the first)")
	fs.DurationVar(&p.objectives.ttft, "ttft", 400*time.Millisecond, "that goodput asks for")
	fs.DurationVar(&p.objectives.tpot, "tpot", 30*time.Millisecond, "that goodput asks for")
	engines := fs.String("engines", "", "URLs of a real prefill and decode engine with NixlConnector, comma separated")
	fs.StringVar(&p.model, "model", "tiny", "the model's name at the engines")
	fs.IntVar(&p.limits.StepTokens, "step-tokens", 512, "the engines' --max-num-batched-tokens")
	fs.IntVar(&p.limits.MaxRunning, "max-running", 64, "the engines' --max-num-seqs")
	fs.IntVar(&p.times, "times", 5, "that each kind of step is measured")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if p.requests < 1 || p.rounds < 1 || p.rate <= 0 || p.times < 1 || fs.NArg() > 0 {
		return errors.New("a flag is out of range")
	}
	if *engines != "" {
		p.engines = strings.Split(*engines, ",")
	}
	if *policies == "" {
		*policies = usual
		if p.engines != nil {
			*policies = "round-robin"
		}
	}
	p.policies = strings.Split(*policies, ",")
	return p.run(ctx, out)
}

// run compares round after round.
func (p *plan) run(ctx context.Context, out io.Writer) error {
	var policies []pick.Policy
	for _, name := range p.policies {
		policy, err := pick.ParsePolicy(name)
		if err != nil {
			return err
		}
		policies = append(policies, policy)
	}
	var f *fleet
	if p.engines != nil {
		var err error
		if f, err = fit(ctx, out, p.engines, p.model, p.limits, p.times); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "%d requests a round, %g a second\n\n%s", p.requests, p.rate, head)
	var all []*comparison
	salt := strconv.FormatInt(time.Now().UnixNano(), 36)
	for i, policy := range policies {
		for round := range p.rounds {
			load := newLoad(p.model, salt, uint64(round+1), p.requests, p.rate)
			c, err := compare(ctx, f, policy, load, uint64(round+1))
			if err != nil {
				return err
			}
			fmt.Fprint(out, c.row(p.policies[i], round+1, p.objectives))
			all = append(all, c)
		}
	}
	ttft, itl := typical(all)
	fmt.Fprintf(out, "\nMedian error, without its sign: TTFT p50 %.1f %%, ITL p50 %.1f %%\n", 100*ttft, 100*itl)
	return nil
}

// compare runs a load in virtual time and in real time. Without a fleet the engines are simulated, and new.
func compare(ctx context.Context, f *fleet, policy pick.Policy, load []request, seed uint64) (*comparison, error) {
	if f == nil {
		s := spec()
		f = &fleet{paced.Fleet{Prefill: 2, Specs: []model.Spec{s, s, s, s}, Link: link}}
		stop, err := f.Start()
		if err != nil {
			return nil, err
		}
		defer stop()
	}
	virtual, err := f.inVirtualTime(ctx, policy, load, seed)
	if err != nil {
		return nil, err
	}
	actual, err := f.inRealTime(ctx, policy, load, seed)
	if err != nil {
		return nil, err
	}
	return &comparison{virtual, actual}, nil
}
