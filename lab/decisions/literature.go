// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/cmd/pdctl/simulate"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// paper is what a publication claims, and what is found here.
type paper struct {
	name  string
	claim string // in the words of the table
	text  string // the paper's setting, and ours
	gains trial
	loses trial
}

// measure is what is compared. Less is better.
type measure struct {
	name    string
	of      func(*shown) float64
	isShare bool // of requests
}

// trial is one load on one fleet, under the policies that are compared: first that without the paper's idea.
type trial struct {
	what     string
	of       measure
	trace    func() (*simulate.Trace, error)
	speed    float64
	requests int
	pd       [2]int
	link     float64 // bytes a second
	slo      simulate.SLO
	counts   func(i int) bool // the requests whose TTFT counts; nil: all
	refuses  bool
	policies []named
}

type named struct {
	name   string
	policy func(*simulate.Fleet) decide.Policy
}

// shown is what a policy has shown in a trial.
type shown struct {
	name           string
	mean, p50, p95 float64 // seconds, TTFT
	itl            float64 // seconds, p99
	good           float64 // share of the requests
	split, refused float64
}

func (t *trial) run(ctx context.Context) ([]shown, error) {
	all := make([]shown, 0, len(t.policies))
	for _, p := range t.policies {
		trace, err := t.trace()
		if err == nil {
			err = trace.Repeat(t.requests)
		}
		if err == nil {
			err = trace.Speed(t.speed)
		}
		if err != nil {
			return nil, err
		}
		f := simulate.UsualFleet()
		f.Prefill, f.Decode, f.Zones = t.pd[0], t.pd[1], 1
		f.Link = model.Link{Latency: .001, BytesPerSecond: t.link}
		f.CrossLink = f.Link
		r, err := simulate.Decide(ctx, f, trace, simulate.Deciding{
			Policy: p.policy(&f), Pick: pick.PrefixAffinity(),
			Class: decide.Class{TTFT: t.slo.TTFT, ITL: t.slo.TPOT, Refusable: t.refuses},
		}, 1)
		if err != nil {
			return nil, err
		}
		all = append(all, t.shown(p.name, r))
	}
	return all, nil
}

func (t *trial) shown(name string, r *simulate.Result) shown {
	n := float64(t.requests)
	s := shown{name: name, itl: r.ITLP99, good: r.Goodput(t.slo) * r.Lasted / n, split: float64(r.Split) / n,
		refused: float64(r.Refused) / n}
	var some []float64
	for i, x := range r.TTFTs() {
		if t.counts == nil || t.counts(i) {
			some = append(some, x)
			s.mean += x
		}
	}
	slices.Sort(some)
	s.mean /= float64(max(len(some), 1))
	if len(some) > 0 {
		s.p50, s.p95 = some[len(some)/2], some[len(some)*95/100]
	}
	return s
}

func constant(p decide.Policy) func(*simulate.Fleet) decide.Policy {
	return func(*simulate.Fleet) decide.Policy { return p }
}

func predicted(f *simulate.Fleet) decide.Policy {
	return decide.Predicted(decide.PredictedOptions{Chunk: f.DecodeSpec.StepTokens})
}

var (
	always = named{"always", constant(decide.Always())}
	never  = named{"never", constant(decide.Never())}
)

// bounded is Dynamo's policy isl_bounding: a request bypasses prefill if fewer than so many tokens of it, and less than
// a share, are not cached at decode.
func bounded(tokens int, share float64) decide.Policy {
	short := decide.Threshold(tokens, 0)
	return decide.Chain(decide.Func(func(in *decide.Input, out *decide.Decision) {
		if short.Decide(in, out); out.Action != decide.DecodeAlone {
			return
		}
		cached := 0
		if out.Decode >= 0 {
			cached = in.Decode[out.Decode].Cached
		}
		if float64(in.Prompt-cached) >= share*float64(in.Prompt) {
			*out = decide.Decision{Prefill: decide.Any, Decode: decide.Any}
		}
	}), decide.Always())
}

// byLoad refuses a request for the load of the moment: no decode engine keeps the objective of ITL, or no prefill
// engine would begin within that of TTFT.
func byLoad(in *decide.Input, out *decide.Decision) {
	*out = decide.Decision{Action: decide.Split, Prefill: decide.Any, Decode: decide.Any, Reason: decide.ReasonPolicy}
	full := func(c decide.Candidate) bool {
		return float64(c.QueueTokens)*c.Speed.PerPrompt > in.Class.TTFT.Seconds()
	}
	slow := func(c decide.Candidate) bool {
		step := c.Speed.Base + c.Speed.PerRequest*float64(c.Running) + c.Speed.PerContext*float64(c.Context)
		return step > in.Class.ITL.Seconds()
	}
	if each(in.Prefill, full) || each(in.Decode, slow) {
		out.Action, out.RetryAfter = decide.Refuse, time.Second
	}
}

func each(of []decide.Candidate, is func(decide.Candidate) bool) bool {
	return len(of) > 0 && !slices.ContainsFunc(of, func(c decide.Candidate) bool { return !is(c) })
}

// byPrediction refuses what Predicted refuses, and splits the rest.
func byPrediction(f *simulate.Fleet) decide.Policy {
	p := predicted(f)
	return decide.Func(func(in *decide.Input, out *decide.Decision) {
		if p.Decide(in, out); out.Action != decide.Refuse {
			decide.Always().Decide(in, out)
		}
	})
}

// turns is a trace of conversations: each prompt has all of the conversation before it. Lengths are in tokens.
type turns struct {
	conversations, turns int
	rate, think          float64 // conversations a second; seconds from turn to turn
	first, later, output [2]int  // tokens: from, and to below
}

func (t turns) trace() (*simulate.Trace, error) { return traceOf(t.entries()) }

func traceOf(all []turn) (*simulate.Trace, error) {
	var b bytes.Buffer
	to := json.NewEncoder(&b)
	for _, e := range all {
		if err := to.Encode(e); err != nil {
			return nil, err
		}
	}
	return simulate.ReadTrace(&b)
}

// turn is a request, as simulate.ReadTrace reads it.
type turn struct {
	At       float64   `json:"at"`
	Session  string    `json:"session"`
	Segments []segment `json:"segments"`
	Answer   string    `json:"answer"`
	Output   int       `json:"output"`

	n int // in its conversation; 0 is the first
}

type segment struct {
	ID    string `json:"id"`
	Bytes int    `json:"bytes"`
}

const tokenBytes = 4 // as simulate counts

// entries are the trace's requests in the order of time.
func (t turns) entries() (all []turn) {
	r := rand.New(rand.NewPCG(7, 1)) //nolint:gosec // the same each time
	in := func(x [2]int) int { return x[0] + r.IntN(x[1]-x[0]) }
	at := 0.0
	for c := range t.conversations {
		at += r.ExpFloat64() / t.rate
		var said []segment
		length := t.first
		for n, when := 0, at; n < t.turns; n++ {
			said = append(said, segment{fmt.Sprintf("c%d question %d", c, n), tokenBytes * in(length)})
			e := turn{At: when, Session: fmt.Sprintf("c%d", c), Segments: slices.Clone(said),
				Answer: fmt.Sprintf("c%d answer %d", c, n), Output: in(t.output), n: n}
			all = append(all, e)
			said = append(said, segment{e.Answer, tokenBytes * e.Output})
			when += t.think * (0.5 + r.Float64())
			length = t.later
		}
	}
	slices.SortStableFunc(all, func(a, b turn) int {
		if a.At < b.At {
			return -1
		}
		return 1
	})
	return all
}

// fan is a trace of documents, one a second, and 16 questions about each within half a second.
func fan() (*simulate.Trace, error) {
	r := rand.New(rand.NewPCG(7, 1)) //nolint:gosec // the same each time
	var all []turn
	at := 0.0
	for d := range 40 {
		at += r.ExpFloat64()
		document := segment{fmt.Sprintf("document %d", d), tokenBytes * (16000 + r.IntN(32000))}
		for q := range 16 {
			id := fmt.Sprintf("document %d question %d", d, q)
			all = append(all, turn{At: at + r.Float64()/2, Session: id, Answer: id + " answer",
				Segments: []segment{document, {id, tokenBytes * 100}}, Output: 50 + r.IntN(100)})
		}
	}
	return traceOf(all) // which sorts them
}

// isLater tells which requests are not the first of their conversation.
func (t turns) isLater() func(int) bool {
	all := t.entries()
	return func(i int) bool { return all[i].n > 0 }
}

// writeLiterature writes literature.md to a folder; "": to the standard output.
func writeLiterature(ctx context.Context, folder string) error {
	text, err := literature(ctx)
	if err != nil {
		return err
	}
	return write(folder, "literature.md", text)
}

//go:embed literature.txt
var literatureIntro string

// literature is docs/literature.md.
func literature(ctx context.Context) (string, error) {
	var b, sections strings.Builder
	b.WriteString(literatureIntro)
	for _, p := range papers() {
		gains, err := p.gains.run(ctx)
		if err != nil {
			return "", err
		}
		loses, err := p.loses.run(ctx)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "| [%s](#%s) | %s | %s | %s |\n", p.name, anchor(p.name), p.claim, p.gains.change(gains),
			p.loses.change(loses))
		fmt.Fprintf(&sections, "\n## %s\n\n%s\n\n%s\n\n%s\nWhere it loses: %s\n\n%s", p.name, p.text, p.gains.what,
			tableOf(gains), p.loses.what, tableOf(loses))
	}
	return b.String() + sections.String(), nil
}

// change is how the last policy differs from the first, by the milliseconds of the table.
func (t *trial) change(all []shown) string {
	was, is := t.of.of(&all[0]), t.of.of(&all[len(all)-1])
	if t.of.isShare {
		return fmt.Sprintf("%s: %s to %s", t.of.name, percent(was), percent(is))
	}
	less := 100 * (math.Round(1e3*is)/math.Round(1e3*was) - 1)
	return fmt.Sprintf("%s %s", t.of.name, strings.Replace(fmt.Sprintf("%+.0f %%", less), "-", "−", 1))
}

func anchor(title string) string { return strings.ReplaceAll(strings.ToLower(title), " ", "-") }

func tableOf(all []shown) string {
	var b strings.Builder
	b.WriteString("| policy | TTFT mean | p50 | p95 | time between tokens p99 | met the objectives | split | " +
		"refused |\n|---|---|---|---|---|---|---|---|\n")
	for _, s := range all {
		fmt.Fprintf(&b, "| %s | %.0f ms | %.0f ms | %.0f ms | %.1f ms | %s | %.0f %% | %s |\n", s.name, 1e3*s.mean,
			1e3*s.p50, 1e3*s.p95, 1e3*s.itl, percent(s.good), 100*s.split, percent(s.refused))
	}
	return b.String()
}
