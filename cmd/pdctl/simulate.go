// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/pdkit/pdkit/cmd/pdctl/simulate"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/pdflow/pick"
)

type simulateCmd struct {
	Trace    string  `placeholder:"FILE" help:"${simulate_trace}"`
	Requests int     `placeholder:"N" help:"${simulate_requests}"`
	Speed    float64 `default:"1" placeholder:"X" help:"Let the requests come so many times as fast."`
	Rate     float64 `default:"24" placeholder:"N" help:"New conversations a second of the generated trace."`
	Duration float64 `default:"120" placeholder:"SECONDS" help:"How long the generated trace is."`
	Write    string  `placeholder:"FILE" help:"Write the trace to this file."`
	Seed     uint64  `default:"1" placeholder:"N" help:"${simulate_seed}"`

	Policies []string `placeholder:"POLICY" help:"${simulate_policies}"`

	Prefill    int       `default:"4" placeholder:"N" help:"Prefill engines."`
	Decode     int       `default:"7" placeholder:"N" help:"Decode engines."`
	Zones      int       `default:"2" placeholder:"N" help:"The engines are distributed over them by turns."`
	Step       []float64 `default:"6830,4.42,0.0762,31.4" placeholder:"US" help:"${simulate_step}"`
	StepTokens int       `default:"8192" placeholder:"N" help:"${simulate_budget}"`
	MaxRunning int       `default:"1024" placeholder:"N" help:"Requests that an engine runs at once."`
	Blocks     int       `default:"25700" placeholder:"N" help:"Blocks of an engine's KV memory."`
	BlockSize  int       `default:"16" placeholder:"N" help:"Tokens of a block."`

	Link      []float64     `default:"20,5" placeholder:"GB/S" help:"${simulate_link}"`
	KVBytes   float64       `name:"kv-bytes" default:"131072" placeholder:"N" help:"Bytes of KV of a token."`
	Handshake time.Duration `default:"150ms" placeholder:"TIME" help:"${simulate_handshake}"`

	SLOTTFT time.Duration `name:"slo-ttft" placeholder:"TIME" help:"${bench_slo_ttft}"`
	SLOTPOT time.Duration `name:"slo-tpot" aliases:"slo-itl" placeholder:"TIME" help:"${bench_slo_tpot}"`

	Markdown bool   `help:"Write the table as Markdown."`
	JSON     bool   `name:"json" help:"Write the figures as JSON."`
	Plots    string `placeholder:"FOLDER" help:"Draw picking-reuse.png, picking-balance.png and picking-tail.png, too."`
}

// mooncake is the word for the trace that pdctl has.
const mooncake = "mooncake"

// Run replays the trace with each policy.
func (c *simulateCmd) Run(s streams) error {
	ctx, stop := interruptible()
	defer stop()
	context.AfterFunc(ctx, stop)
	fleet, err := c.fleet()
	if err != nil {
		return err
	}
	trace, err := c.trace()
	if err != nil {
		return err
	}
	if c.Write != "" {
		var b bytes.Buffer
		if err := trace.Write(&b); err != nil {
			return err
		}
		if err := os.WriteFile(c.Write, b.Bytes(), 0o600); err != nil {
			return err
		}
	}
	names := c.Policies
	if len(names) == 0 {
		names = pick.Policies()
	}
	results := make([]*simulate.Result, 0, len(names))
	for _, name := range names {
		r, err := c.replay(ctx, fleet, trace, name)
		if err != nil {
			return orInterrupted(ctx, err)
		}
		results = append(results, r)
	}
	if err := c.report(s.out, fleet, trace, results); err != nil || c.Plots == "" {
		return err
	}
	return simulate.Draw(c.Plots, results)
}

// replay replays the trace with a policy.
func (c *simulateCmd) replay(ctx context.Context, f simulate.Fleet, t *simulate.Trace, name string) (*simulate.Result,
	error) {
	if name == "kv" {
		return simulate.RunKV(ctx, f, t, c.Seed)
	}
	policy, err := pick.ParsePolicy(name)
	if err != nil {
		return nil, err
	}
	return simulate.Run(ctx, f, t, policy, c.Seed)
}

func (c *simulateCmd) report(out io.Writer, f simulate.Fleet, t *simulate.Trace, results []*simulate.Result) error {
	var slo *simulate.SLO
	if c.SLOTTFT > 0 || c.SLOTPOT > 0 {
		slo = &simulate.SLO{TTFT: c.SLOTTFT, TPOT: c.SLOTPOT}
	}
	if !c.JSON {
		return simulate.Text(out, f, t, results, slo, c.Markdown)
	}
	rows := make([]simulate.Figures, 0, len(results))
	for _, r := range results {
		rows = append(rows, r.Figures(slo))
	}
	return writeJSON(out, rows)
}

func (c *simulateCmd) fleet() (f simulate.Fleet, err error) {
	if len(c.Step) == 4 {
		c.Step = append(c.Step, 0)
	}
	if len(c.Step) != 5 || len(c.Link) < 1 || len(c.Link) > 2 {
		return f, errors.New("--step has four or five numbers, --link one or two")
	}
	if c.SLOTTFT < 0 || c.SLOTPOT < 0 || min(c.Link[0], c.Link[len(c.Link)-1]) < 0 {
		return f, errors.New("an SLO and the speed of a link cannot be negative")
	}
	const us = 1e-6
	spec := model.Spec{
		StepTime: model.StepTime{Base: c.Step[0] * us, PerRequest: c.Step[1] * us, PerContextToken: c.Step[2] * us,
			PerPrefillToken: c.Step[3] * us, PerAttention: c.Step[4] * us},
		StepTokens: c.StepTokens, MaxRunning: c.MaxRunning, Blocks: c.Blocks, BlockSize: c.BlockSize,
		BytesPerToken: c.KVBytes,
	}
	f = simulate.UsualFleet()
	f.Prefill, f.Decode, f.Zones, f.Handshake = c.Prefill, c.Decode, c.Zones, c.Handshake
	f.PrefillSpec, f.DecodeSpec = spec, spec
	f.Link.BytesPerSecond, f.CrossLink.BytesPerSecond = c.Link[0]*1e9, c.Link[len(c.Link)-1]*1e9
	return f, nil
}

func (c *simulateCmd) trace() (*simulate.Trace, error) {
	trace, err := c.source()
	if err != nil {
		return nil, err
	}
	if c.Requests != 0 {
		if err := trace.Repeat(c.Requests); err != nil {
			return nil, fmt.Errorf("--requests: %w", err)
		}
	}
	if err := trace.Speed(c.Speed); err != nil {
		return nil, fmt.Errorf("--speed: %w", err)
	}
	return trace, nil
}

func (c *simulateCmd) source() (*simulate.Trace, error) {
	switch c.Trace {
	case "":
		g := simulate.Usual()
		g.Rate, g.Seconds = c.Rate, c.Duration
		return g.Trace(c.Seed)
	case mooncake:
		return simulate.Mooncake()
	}
	f, err := os.Open(c.Trace)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	t, err := simulate.ReadTrace(f)
	if err != nil {
		return nil, fmt.Errorf("--trace: %w", err)
	}
	return t, nil
}
