// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/pdkit/pdkit/enginesim/virtual"
)

// Result is what a policy has shown.
type Result struct {
	Policy       string
	PromptTokens int
	ReusedTokens int       // of prompts: found in the cache of the engine that computed them
	TTFT, E2E    []float64 // seconds of the requests that were served, sorted
	ITLP50       float64   // seconds
	ITLP99       float64
	PrefillBusy  []float64 // seconds that each prefill engine computed
	DecodeTokens []float64 // that each decode engine made
	Preemptions  int
	Pairs        int // different pairs that have served a request
	Crossed      int // requests whose KV went from zone to zone
	Refused      int
	Split        int     // served by two engines
	Failed       int     // they fit no engine's memory
	Lasted       float64 // seconds until the last response ended

	ttft, tpot []float64 // of each request that was served, in the order of arrival
}

func newResult(policy string, f *Fleet, out *virtual.Result) *Result {
	r := &Result{Policy: policy, Pairs: out.Pairs, Lasted: out.Lasted, ITLP50: out.Gaps.Quantile(.5),
		ITLP99: out.Gaps.Quantile(.99)}
	for i := range out.Outcomes {
		o := &out.Outcomes[i]
		switch {
		case o.Refused:
			r.Refused++
			continue
		case o.Failed:
			r.Failed++
			continue
		}
		r.PromptTokens += o.Prompt
		r.ReusedTokens += o.Reused
		r.ttft = append(r.ttft, o.TTFT())
		r.tpot = append(r.tpot, o.TPOT())
		r.E2E = append(r.E2E, o.End-o.At)
		if o.Prefill >= 0 {
			r.Split++
		}
		if o.Prefill >= 0 && o.Prefill%f.Zones != o.Decode%f.Zones {
			r.Crossed++
		}
	}
	r.TTFT = slices.Sorted(slices.Values(r.ttft))
	slices.Sort(r.E2E)
	for i, s := range out.Engines {
		r.Preemptions += s.Preemptions
		if i < f.Prefill {
			r.PrefillBusy = append(r.PrefillBusy, s.Busy)
		} else {
			r.DecodeTokens = append(r.DecodeTokens, float64(s.Made))
		}
	}
	return r
}

// Reuse is the share of the prompts' tokens that were cached, in percent.
func (r *Result) Reuse() float64 {
	return 100 * float64(r.ReusedTokens) / float64(max(r.PromptTokens, 1))
}

// Goodput is the number of requests a second that met the objectives.
func (r *Result) Goodput(slo SLO) float64 {
	n := 0
	for i, first := range r.ttft {
		if (slo.TTFT == 0 || first <= slo.TTFT.Seconds()) && (slo.TPOT == 0 || r.tpot[i] <= slo.TPOT.Seconds()) {
			n++
		}
	}
	return float64(n) / max(r.Lasted, 1e-9)
}

// imbalance returns the load of the most loaded engine, divided by the mean load. 1 is even.
func imbalance(load []float64) float64 {
	sum := 0.0
	for _, x := range load {
		sum += x
	}
	if sum == 0 {
		return 1
	}
	return slices.Max(load) * float64(len(load)) / sum
}

// quantile returns a quantile of sorted values.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[int(q*float64(len(sorted)-1))]
}

// cells are a row of the table.
func (r *Result) cells(slo *SLO) []string {
	ms := func(seconds float64) string { return fmt.Sprintf("%.0f ms", 1000*seconds) }
	row := []string{fmt.Sprintf("%.1f %%", r.Reuse()), fmt.Sprintf("%.2f", imbalance(r.PrefillBusy)),
		fmt.Sprintf("%.2f", imbalance(r.DecodeTokens)), ms(quantile(r.TTFT, .5)), ms(quantile(r.TTFT, .99)),
		fmt.Sprintf("%.1f ms", 1000*r.ITLP50), fmt.Sprintf("%.1f ms", 1000*r.ITLP99),
		fmt.Sprintf("%.2f s", quantile(r.E2E, .99)), strconv.Itoa(r.Pairs),
		fmt.Sprintf("%.0f %%", 100*float64(r.Crossed)/float64(max(len(r.TTFT), 1)))}
	if slo != nil {
		row = append(row, fmt.Sprintf("%.2f/s", r.Goodput(*slo)))
	}
	return row
}

// SLO are the objectives that goodput counts by: the first token within a time, and the mean time between two tokens at
// most another. 0 is none.
type SLO struct{ TTFT, TPOT time.Duration }

// Text writes a table of results: with markdown as in docs/picking.md. slo may be nil.
func Text(w io.Writer, f Fleet, t *Trace, results []*Result, slo *SLO, markdown bool) error {
	tokens, out, last := 0, 0, 0.0
	for i := range t.requests {
		e, at, _ := t.at(i)
		tokens, out, last = tokens+(e.size()+tokenBytes-1)/tokenBytes, out+e.Output, at
	}
	fmt.Fprintf(w, "%d requests in %.0f s, %d tokens of prompt and %d of response on average; %d prefill and %d "+
		"decode engines in %d zones\n\n", t.requests, last, tokens/t.requests, out/t.requests, f.Prefill,
		f.Decode, f.Zones)
	head := []string{"policy", "reused", "prefill max/mean", "decode max/mean", "TTFT p50", "TTFT p99", "ITL p50",
		"ITL p99", "total p99", "pairs used", "between zones"}
	if slo != nil {
		head = append(head, "goodput")
	}
	if markdown {
		fmt.Fprintf(w, "| %s |\n|%s\n", strings.Join(head, " | "), strings.Repeat("---|", len(head)))
		for _, r := range results {
			fmt.Fprintln(w, r.Row(slo))
		}
		return nil
	}
	to := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(to, strings.Join(head, "\t")+"\t")
	for _, r := range results {
		fmt.Fprintln(to, r.Policy+"\t"+strings.Join(r.cells(slo), "\t")+"\t")
	}
	return to.Flush()
}

// Row is the result as a row of the table in Markdown. slo may be nil.
func (r *Result) Row(slo *SLO) string {
	return "| `" + r.Policy + "` | " + strings.Join(r.cells(slo), " | ") + " |"
}

// Figures are a result for other programs. Times are in seconds.
type Figures struct {
	Policy      string   `json:"policy"`
	Served      int      `json:"served"`
	Refused     int      `json:"refused"`
	Failed      int      `json:"failed"`
	Reuse       float64  `json:"reuse"` // share of the prompts' tokens
	TTFTP50     float64  `json:"ttftP50"`
	TTFTP99     float64  `json:"ttftP99"`
	ITLP50      float64  `json:"itlP50"`
	ITLP99      float64  `json:"itlP99"`
	E2EP50      float64  `json:"e2eP50"`
	E2EP99      float64  `json:"e2eP99"`
	Preemptions int      `json:"preemptions"`
	Pairs       int      `json:"pairs"`
	Lasted      float64  `json:"lasted"`
	Goodput     *float64 `json:"goodput,omitempty"` // requests a second
}

// Figures gives the result for other programs. slo may be nil.
func (r *Result) Figures(slo *SLO) Figures {
	f := Figures{Policy: r.Policy, Served: len(r.TTFT), Refused: r.Refused, Failed: r.Failed, Reuse: r.Reuse() / 100,
		TTFTP50: quantile(r.TTFT, .5), TTFTP99: quantile(r.TTFT, .99), ITLP50: r.ITLP50, ITLP99: r.ITLP99,
		E2EP50: quantile(r.E2E, .5), E2EP99: quantile(r.E2E, .99), Preemptions: r.Preemptions, Pairs: r.Pairs,
		Lasted: r.Lasted}
	if slo != nil {
		goodput := r.Goodput(*slo)
		f.Goodput = &goodput
	}
	return f
}

// TTFTs are the times to the first token in seconds, of the requests that were served, in the order of arrival.
func (r *Result) TTFTs() []float64 { return r.ttft }

// TTFTP99 is the 99th percentile of the time to the first token, in seconds.
func (r *Result) TTFTP99() float64 { return quantile(r.TTFT, .99) }
