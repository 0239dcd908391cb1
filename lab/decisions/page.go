// SPDX-License-Identifier: Apache-2.0

package main

import (
	_ "embed"
	"fmt"
	"slices"
	"strings"
)

// intro is the page's beginning, with the numbers of cells and of requests.
//
//go:embed intro.txt
var intro string

// share is how much of the best of the others the decider reaches.
func (c *cell) share(x figure) float64 { return x.good / max(c.rival(), 1e-9) }

// keeps reports whether a policy's p99 of the time between tokens is within the objective; a class of the histogram is
// 4 % wide.
func (c *cell) keeps(x figure) bool { return x.itl <= 1.04*c.w.slo.TPOT.Seconds() }

// The bars: of the decider, and with wrong speeds, old loads and two gateways.
const (
	near   = 0.97
	robust = 0.9
)

// misses are the cells below a bar.
func misses(all []*cell) (below, withErrors, late []*cell) {
	for _, c := range all {
		if c.share(c.decider) < near {
			below = append(below, c)
		}
		if c.share(c.robust) < robust {
			withErrors = append(withErrors, c)
		}
		if !c.keeps(c.decider) && (c.keeps(c.always) || c.keeps(c.never)) {
			late = append(late, c)
		}
	}
	return below, withErrors, late
}

// page is docs/decisions.md.
func page(all []*cell, requests int) string {
	var b strings.Builder
	best := 0
	for _, c := range all {
		if c.decider.good >= c.rival() {
			best++
		}
	}
	patient := 0
	for _, c := range all {
		if c.share(c.patient) >= near {
			patient++
		}
	}
	below, withErrors, late := misses(all)
	fmt.Fprintf(&b, intro, len(all), requests)
	for i := range workloads {
		w := &workloads[i]
		fmt.Fprintf(&b, "| %s | %s | TTFT %v, time between tokens %v | %.2f, %.2f, %.2f |\n", w.name, w.what,
			w.slo.TTFT, w.slo.TPOT, w.speeds[0], w.speeds[1], w.speeds[2])
	}
	fmt.Fprintf(&b, "\nThe decider is at least as good as the best of the three in %d cells, and reaches %.0f %% of "+
		"it in %d. Without refusing it does so in %d. With wrong speeds (prefill 50 %% too long, decode "+
		"50 %% too short), loads that are 1 s old and two gateways it reaches %.0f %% of what the best of the "+
		"three has without all that in %d.\n\n"+
		"![Goodput](decisions.png)\n\n",
		best, 100*near, len(all)-len(below), patient, 100*robust, len(all)-len(withErrors))
	b.WriteString("## When splitting pays\n\nThe mean over workloads and loads:\n\n" +
		"| prefill:decode | link | always | never | best threshold | decider | of its requests split | refused |\n" +
		"|---|---|---|---|---|---|---|---|\n")
	for _, pd := range ratios {
		for _, link := range links {
			some := slices.DeleteFunc(slices.Clone(all), func(c *cell) bool { return c.pd != pd || c.link != link })
			mean := func(of func(*cell) float64) string {
				sum := 0.0
				for _, c := range some {
					sum += of(c)
				}
				return percent(sum / float64(max(len(some), 1)))
			}
			fmt.Fprintf(&b, "| %d:%d | %.0f Gbit/s | %s | %s | %s | %s | %s | %s |\n", pd[0], pd[1], link*8/1e9,
				mean(func(c *cell) float64 { return c.always.good }),
				mean(func(c *cell) float64 { return c.never.good }),
				mean(func(c *cell) float64 { return c.threshold.good }),
				mean(func(c *cell) float64 { return c.decider.good }),
				mean(func(c *cell) float64 { return c.decider.split }),
				mean(func(c *cell) float64 { return c.decider.refused }))
		}
	}
	b.WriteString("\n`never` leaves the prefill engines idle: its figures say what the decode engines of that ratio " +
		"can do alone.\n\n")
	list(&b, "Where the decider is below 97 % of the best of the three", below, func(c *cell) string {
		return fmt.Sprintf("%.2f", c.share(c.decider))
	})
	list(&b, "Where it is below 90 % with errors", withErrors, func(c *cell) string {
		return fmt.Sprintf("%.2f", c.share(c.robust))
	})
	list(&b, "Where one token in a hundred comes later than the objective, and `always` or `never` kept it", late,
		func(c *cell) string {
			says := func(x figure) string { return fmt.Sprintf("%.0f ms at %s", 1e3*x.itl, percent(x.good)) }
			return fmt.Sprintf("p99 %s good; always %s, never %s", says(c.decider), says(c.always), says(c.never))
		})
	b.WriteString("## All cells\n\n" + table(all))
	return b.String()
}

func list(b *strings.Builder, title string, all []*cell, says func(*cell) string) {
	fmt.Fprintf(b, "## %s\n\n", title)
	for _, c := range all {
		fmt.Fprintf(b, "- %s: %s\n", c, says(c))
	}
	if len(all) == 0 {
		b.WriteString("None.\n")
	}
	b.WriteString("\n")
}

// table is the map as text.
func table(all []*cell) string {
	var b strings.Builder
	b.WriteString("The number behind a threshold is its tokens. The last columns are the p99 of the time between " +
		"tokens, in milliseconds.\n\n" +
		"| cell | always | never | threshold | decider | refused | without refusing | with errors | always | " +
		"never | decider |\n|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, c := range all {
		b.WriteString(c.row())
	}
	return b.String()
}

func (c *cell) row() string {
	return fmt.Sprintf("| %s | %s | %s | %s (%d) | %s | %s | %s | %s | %.0f | %.0f | %.0f |\n", c,
		percent(c.always.good), percent(c.never.good), percent(c.threshold.good), c.best, percent(c.decider.good),
		percent(c.decider.refused), percent(c.patient.good), percent(c.robust.good),
		1e3*c.always.itl, 1e3*c.never.itl, 1e3*c.decider.itl)
}

func percent(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) }
