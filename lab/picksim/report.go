// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

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

func (r *result) reuse() float64 { return 100 * float64(r.reused) / float64(max(r.prompt, 1)) }

func printTable(w io.Writer, f fleet, jobs []*job, results []*result) error {
	tokens := 0
	for _, j := range jobs {
		tokens += j.tokens
	}
	fmt.Fprintf(w, "%d requests in %.0f s, %d tokens of prompt each on average; %d prefill and %d decode engines in "+
		"%d zones\n\n",
		len(jobs), jobs[len(jobs)-1].at, tokens/len(jobs), f.prefill, f.decode, f.zones)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "policy\treused\tprefill max/mean\tdecode max/mean\tTTFT p50\tTTFT p99\ttotal p50\ttotal "+
		"p99\tpairs used\tcross-zone\t")
	for _, r := range results {
		fmt.Fprintf(t, "%s\t%.1f %%\t%.2f\t%.2f\t%.0f ms\t%.0f ms\t%.2f s\t%.2f s\t%d\t%.0f %%\t\n", r.policy,
			r.reuse(), imbalance(r.prefillLoad), imbalance(r.decodeLoad),
			1000*quantile(r.first, .5), 1000*quantile(r.first, .99), quantile(r.whole, .5), quantile(r.whole, .99),
			r.pairs, 100*float64(r.crossed)/float64(len(r.first)))
	}
	return t.Flush()
}
