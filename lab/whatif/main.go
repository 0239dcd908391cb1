// SPDX-License-Identifier: Apache-2.0

// Command whatif tries predictions of `pdctl replay` for real. A flow with a decider sends a load over HTTP to
// simulated engines that take a model's time, and records its decisions. From that file alone it is predicted what
// another set-up would have done with the same requests; then they are sent again, to that set-up. It writes the table
// of docs/what-if.md. Run it from the repository root, on a quiet machine; a round takes about three minutes:
//
//	go run ./lab/whatif
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"time"

	"github.com/pdkit/pdkit/cmd/pdctl/simulate"
	"github.com/pdkit/pdkit/pdflow/decide/record"
)

// objectives are what goodput counts by, and what the decider aims at.
var objectives = simulate.SLO{TTFT: time.Second, TPOT: 40 * time.Millisecond}

// recordedSetUp is the one whose decisions are recorded, and changes are what is predicted from these.
var (
	recordedSetUp = setUp{2, 2, record.Spec{Mode: "threshold", UncachedTokens: 500}}
	changes       = []change{
		{"policy", setUp{2, 2, record.Spec{Mode: "never"}}},
		{"ratio", setUp{1, 3, record.Spec{Mode: "threshold", UncachedTokens: 500}}},
		{"threshold", setUp{2, 2, record.Spec{Mode: "threshold", UncachedTokens: 1000}}},
		{"learning", setUp{2, 2, record.Spec{Mode: "predicted", TTFT: objectives.TTFT, ITL: objectives.TPOT}}},
	}
)

type change struct {
	name string
	to   setUp
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := command(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "whatif:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("whatif", flag.ContinueOnError)
	requests := fs.Int("requests", 200, "of each run")
	rate := fs.Float64("rate", 7, "requests a second")
	rounds := fs.Int("rounds", 3, "each with requests of its own")
	keep := fs.String("keep", "", "write what the last round has recorded to this file, for pdctl replay")
	only := fs.String("only", "", "only this change: policy, ratio, threshold or learning")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if *requests < 1 || *rounds < 1 || !(*rate > 0) || fs.NArg() > 0 {
		return errors.New("a flag is out of range")
	}
	all := slices.DeleteFunc(slices.Clone(changes), func(c change) bool { return *only != "" && c.name != *only })
	if len(all) == 0 {
		return fmt.Errorf("there is no change %q", *only)
	}
	fmt.Fprintf(out, "%d requests a round, %g a second; recorded: %s\n\n%s", *requests, *rate, &recordedSetUp, head)
	for round := range *rounds {
		load := newLoad(uint64(round+1), *requests, *rate)
		t, err := try(ctx, load, all)
		if err != nil {
			return err
		}
		fmt.Fprint(out, t.rows(round+1))
		if *keep != "" {
			if err := os.WriteFile(*keep, t.file, 0o600); err != nil {
				return err
			}
		}
	}
	return nil
}

// trial is a load that was recorded, and what was predicted and measured of changes.
type trial struct {
	came, replayed      simulate.Shown // of the recorded set-up: measured, and in virtual time
	changes             []change
	file                []byte // that was recorded
	predicted, measured []simulate.Shown
}

func try(ctx context.Context, load []request, changes []change) (*trial, error) {
	_, file, err := inRealTime(ctx, recordedSetUp, load)
	if err != nil {
		return nil, err
	}
	r, err := recorded(ctx, file)
	if err != nil {
		return nil, err
	}
	r.Fleet.PrefillSpec.StepTokens, r.Fleet.DecodeSpec.StepTokens = engine().StepTokens, engine().StepTokens
	if err := r.Fit(ctx, 1); err != nil {
		return nil, err
	}
	t := &trial{came: r.Came(objectives), changes: changes, file: file}
	if t.replayed, err = r.Replay(ctx, r.Fleet, r.By, objectives, 1); err != nil {
		return nil, err
	}
	for _, c := range changes { // all that is predicted is predicted before anything is measured
		f, by := r.Fleet, r.By
		f.Prefill, f.Decode = c.to.prefill, c.to.decode
		if by.Policy, err = c.to.policy.Policy(); err != nil {
			return nil, err
		}
		s, err := r.Replay(ctx, f, by, objectives, 1)
		if err != nil {
			return nil, err
		}
		t.predicted = append(t.predicted, s)
	}
	for _, c := range changes {
		_, file, err := inRealTime(ctx, c.to, load)
		if err != nil {
			return nil, err
		}
		r, err := recorded(ctx, file)
		if err != nil {
			return nil, err
		}
		t.measured = append(t.measured, r.Came(objectives))
	}
	return t, nil
}

func recorded(ctx context.Context, file []byte) (*simulate.Recorded, error) {
	_, entries, err := record.Read(bytes.NewReader(file))
	if err != nil {
		return nil, err
	}
	return simulate.ReadRecorded(ctx, entries, 1)
}
