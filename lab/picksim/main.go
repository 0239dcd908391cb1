// SPDX-License-Identifier: Apache-2.0

// Command picksim replays a trace of requests with each policy of package pick. It prints how evenly the engines are
// loaded, which share of the prompts was in their prefix caches, and how long the requests took. Run it from the
// repository root: go run ./lab/picksim. The pickers are the real ones. The engines and the time are simulated:
// README.md describes the model.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/pdkit/pdkit/pdflow/pick"
)

func main() {
	err := run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "picksim:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("picksim", flag.ContinueOnError)
	fs.SetOutput(stderr)
	seed := fs.Uint64("seed", 1, "of the generated trace and of the policies")
	traceFile := fs.String("trace", "", "replay this `FILE` of JSON lines in place of a generated trace")
	write := fs.String("write", "", "write the trace to this `FILE`")
	plots := fs.String("plots", "", "draw PNGs into this `FOLDER`")
	names := fs.String("policies", strings.Join(pick.Policies(), ","), "the policies, comma separated")
	g := usualLoad()
	fs.Float64Var(&g.rate, "rate", g.rate, "new conversations per second of the generated trace")
	fs.Float64Var(&g.seconds, "seconds", g.seconds, "length of the generated trace")
	f := usualFleet()
	fs.IntVar(&f.prefill, "prefill", f.prefill, "prefill engines")
	fs.IntVar(&f.decode, "decode", f.decode, "decode engines")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if f.prefill < 1 || f.decode < 1 || fs.NArg() > 0 || g.rate <= 0 || g.seconds <= 0 {
		return errors.New("both roles need engines, rate and seconds must be above 0, and nothing may follow the flags")
	}
	policies, err := parsePolicies(*names)
	if err != nil {
		return err
	}
	trace := g.generate(*seed)
	if *traceFile != "" {
		if trace, err = readTrace(*traceFile); err != nil {
			return err
		}
	}
	if *write != "" {
		if err := writeTrace(*write, trace); err != nil {
			return err
		}
	}
	jobs, err := prepare(trace)
	if err != nil {
		return err
	}
	results := make([]*result, 0, len(policies))
	for _, p := range policies {
		r, err := simulate(ctx, f, p, *seed, jobs)
		if err != nil {
			return err
		}
		results = append(results, r)
	}
	if err := printTable(stdout, f, jobs, results); err != nil || *plots == "" {
		return err
	}
	return draw(*plots, results)
}

func parsePolicies(names string) ([]pick.Policy, error) {
	var all []pick.Policy
	for name := range strings.SplitSeq(names, ",") {
		p, err := pick.ParsePolicy(name)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}
