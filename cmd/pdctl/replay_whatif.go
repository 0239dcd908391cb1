// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/pdkit/pdkit/cmd/pdctl/simulate"
	"github.com/pdkit/pdkit/pdflow/decide/record"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// whatIf is another set-up, which recorded requests are played with. What it does not say stays as it was.
type whatIf struct {
	Policy          string        `placeholder:"MODE" help:"${replay_policy}"`
	MinPromptTokens int           `placeholder:"N" help:"With threshold and predicted: a shorter prompt is not split."`
	UncachedTokens  int           `placeholder:"N" help:"${replay_uncached}"`
	Prefill         *int          `placeholder:"N" help:"Prefill engines."`
	Decode          *int          `placeholder:"N" help:"Decode engines."`
	SLOTTFT         time.Duration `name:"slo-ttft" placeholder:"TIME" help:"${replay_slo}"`
	SLOTPOT         time.Duration `name:"slo-tpot" aliases:"slo-itl" placeholder:"TIME" help:"${bench_slo_tpot}"`

	Pick       string `default:"prefix" placeholder:"POLICY" help:"How the gateway picks, as for its -pick."`
	StepTokens int    `default:"2048" placeholder:"N" help:"${simulate_budget}"`
	Seed       uint64 `default:"1" placeholder:"N" help:"The same seed gives the same output."`
}

func (c *whatIf) asked() bool {
	return c.Policy != "" || c.MinPromptTokens != 0 || c.UncachedTokens != 0 || c.Prefill != nil || c.Decode != nil
}

func (c *whatIf) check() error {
	for _, x := range [...]struct {
		flag string
		n    *int
	}{{"--prefill", c.Prefill}, {"--decode", c.Decode}} {
		if x.n != nil && (*x.n < 1 || *x.n > simulate.EnginesMost) {
			return fmt.Errorf("%s has a number of engines from 1 to %d", x.flag, simulate.EnginesMost)
		}
	}
	switch {
	case c.MinPromptTokens < 0 || c.UncachedTokens < 0:
		return errors.New("--min-prompt-tokens and --uncached-tokens are not below 0")
	case c.SLOTTFT < 0 || c.SLOTPOT < 0:
		return errors.New("--slo-ttft and --slo-tpot are not below 0")
	case c.StepTokens < 1:
		return errors.New("--step-tokens is above 0")
	}
	return nil
}

// answered is the result for other programs.
type answered struct {
	Recorded simulate.Shown `json:"recorded"`
	Replayed simulate.Shown `json:"replayed"` // the same set-up, in virtual time
	WhatIf   simulate.Shown `json:"whatIf"`
	Share    float64        `json:"share"` // of the requests that were recorded
	Unread   int            `json:"unread"`
	Assumed  int            `json:"assumedLengths"`
	Prefill  [2]int         `json:"prefill"` // engines, before and after
	Decode   [2]int         `json:"decode"`
}

// answer plays the files' requests, with the set-up that they were recorded with and with the other one.
func (c *whatIf) answer(files []string, asJSON bool, s streams) error {
	if err := c.check(); err != nil {
		return err
	}
	ctx, stop := interruptible()
	defer stop()
	r, err := readRecorded(ctx, files, s, c.Seed)
	if err != nil {
		return orInterrupted(ctx, err)
	}
	h := &r.Header
	if r.By.Pick, err = pick.ParsePolicy(c.Pick); err != nil {
		return err
	}
	r.Fleet.PrefillSpec.StepTokens, r.Fleet.DecodeSpec.StepTokens = c.StepTokens, c.StepTokens
	if err := r.Fit(ctx, c.Seed); err != nil {
		return orInterrupted(ctx, err)
	}
	slo := simulate.SLO{TTFT: c.SLOTTFT, TPOT: c.SLOTPOT}
	a := answered{Recorded: r.Came(slo), Share: h.Share, Unread: r.Unread, Assumed: r.Assumed}
	if a.Replayed, err = r.Replay(ctx, r.Fleet, r.By, slo, c.Seed); err != nil {
		return orInterrupted(ctx, err)
	}
	f, by := r.Fleet, r.By
	if c.Prefill != nil {
		f.Prefill = *c.Prefill
	}
	if c.Decode != nil {
		f.Decode = *c.Decode
	}
	spec := h.Policy
	if c.Policy != "" {
		spec = record.Spec{Mode: c.Policy, TTFT: spec.TTFT, ITL: spec.ITL}
	}
	spec.MinPromptTokens = cmp.Or(c.MinPromptTokens, spec.MinPromptTokens)
	spec.UncachedTokens = cmp.Or(c.UncachedTokens, spec.UncachedTokens)
	by.Class.TTFT, by.Class.ITL = cmp.Or(c.SLOTTFT, by.Class.TTFT), cmp.Or(c.SLOTPOT, by.Class.ITL)
	if by.Policy, err = spec.Policy(); err != nil {
		return err
	}
	if a.WhatIf, err = r.Replay(ctx, f, by, slo, c.Seed); err != nil {
		return orInterrupted(ctx, err)
	}
	a.Prefill, a.Decode = [2]int{r.Fleet.Prefill, f.Prefill}, [2]int{r.Fleet.Decode, f.Decode}
	if asJSON {
		return writeJSON(s.out, a)
	}
	return a.print(s.out, h.Policy.Mode, spec.Mode)
}

// readRecorded reads the files of one gateway, one after the other. What is wrong with a file, and does not end all, is
// told.
func readRecorded(ctx context.Context, files []string, s streams, seed uint64) (*simulate.Recorded, error) {
	var name string
	r, err := simulate.ReadRecorded(ctx, func(yield func(*record.Entry, error) bool) {
		for _, name = range files {
			if !recordedIn(name, s, yield) {
				return
			}
		}
	}, seed)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if r.SetBack > 0 {
		fmt.Fprintf(s.err, "pdctl: of %d files the clock was set back, or they are in another order: each is played "+
			"behind the one before it\n", r.SetBack)
	}
	return r, nil
}

// recordedIn yields the entries of a file, and what is wrong with its lines, which it tells at the end.
func recordedIn(name string, s streams, yield func(*record.Entry, error) bool) (more bool) {
	from, err := opened(name, s.in)
	if err != nil {
		return yield(nil, err)
	}
	defer from.Close()
	_, entries, err := record.Read(from)
	if errors.Is(err, record.ErrEmpty) {
		tellEmpty(name, s)
		return true
	}
	if err != nil {
		return yield(nil, err)
	}
	problems, first := map[record.Problem]int{}, 0
	defer func() {
		if printProblems(s.err, name+": ", problems); first > 0 {
			fmt.Fprintf(s.err, "%s: the first of these is line %d\n", name, first)
		}
	}()
	for e, err := range entries {
		if bad, is := errors.AsType[*record.LineError](err); is {
			problems[bad.Problem]++
			first = cmp.Or(first, bad.Line)
		}
		if !yield(e, err) {
			return false
		}
	}
	return true
}

// print writes the answer as a table.
func (a *answered) print(out io.Writer, mode, otherMode string) error {
	to := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(to, "\trequests\tTTFT p50\tTTFT p99\tITL p50\tITL p99\tgoodput\tsplit\trefused\t\n")
	row := func(name string, s *simulate.Shown) {
		fmt.Fprintf(to, "%s\t%d\t%.0f ms\t%.0f ms\t%.1f ms\t%.1f ms\t%.1f %%\t%.1f %%\t%.1f %%\t\n", name, s.Requests,
			1e3*s.TTFTP50, 1e3*s.TTFTP99, 1e3*s.ITLP50, 1e3*s.ITLP99, 100*s.Goodput, 100*s.Split, 100*s.Refused)
	}
	off := func(name string, s, than *simulate.Shown) {
		share := func(x, y float64) string {
			if y == 0 {
				return "-"
			}
			return fmt.Sprintf("%+.0f %%", 100*(x/y-1))
		}
		fmt.Fprintf(to, "%s\t\t%s\t%s\t%s\t%s\t%+.1f\t%+.1f\t%+.1f\t\n", name, share(s.TTFTP50, than.TTFTP50),
			share(s.TTFTP99, than.TTFTP99), share(s.ITLP50, than.ITLP50), share(s.ITLP99, than.ITLP99),
			100*(s.Goodput-than.Goodput), 100*(s.Split-than.Split), 100*(s.Refused-than.Refused))
	}
	name := func(i int, mode string) string { return fmt.Sprintf("%dP %dD %s", a.Prefill[i], a.Decode[i], mode) }
	row("recorded: "+name(0, mode), &a.Recorded)
	row("the same, replayed", &a.Replayed)
	off("error of the model", &a.Replayed, &a.Recorded)
	row("what if: "+name(1, otherMode), &a.WhatIf)
	off("change", &a.WhatIf, &a.Replayed)
	if err := to.Flush(); err != nil {
		return err
	}
	if a.Share < 1 {
		fmt.Fprintf(out, "\nOf the conversations %.3g %% were recorded; the others are played as copies of these.\n",
			100*a.Share)
	}
	if a.Assumed > 0 {
		fmt.Fprintf(out, "\nOf %d responses no length was recorded: they get that of another one.\n", a.Assumed)
	}
	if a.Unread > 0 {
		fmt.Fprintf(out, "\n%d lines could not be read.\n", a.Unread)
	}
	return nil
}
