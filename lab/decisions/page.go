// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"strings"
)

// table is the map as text.
func table(all []*cell) string {
	var b strings.Builder
	b.WriteString("| workload | P:D | load | link | always | never | threshold | decider | with errors | of the best | ITL p99: always, never, decider |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, c := range all {
		fmt.Fprintf(&b, "| %s | %d:%d | %s | %.0f | %s | %s | %s (%d) | %s | %s | %.2f / %.2f | %.0f, %.0f, %.0f |\n", c.w.name, c.pd[0], c.pd[1],
			loads[c.load], c.link*8/1e9, percent(c.always.good), percent(c.never.good), percent(c.threshold.good), c.best,
			percent(c.decider.good), percent(c.robust.good), c.decider.good/max(c.rival(), 1e-9), c.robust.good/max(c.rival(), 1e-9), 1e3*c.always.itl, 1e3*c.never.itl, 1e3*c.decider.itl)
		if os.Getenv("DBG") != "" {
			fmt.Fprintf(&b, "      split %.2f ttftp99 always %.2f decider %.2f\n", c.decider.split, c.always.p99, c.decider.p99)
		}
	}
	return b.String()
}

func percent(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) }

func page(all []*cell, requests int) string { return table(all) }

func (c *cell) late(itl float64) bool { return itl > c.w.slo.TPOT.Seconds()*1.04 } // a bin of the histogram

func summary(all []*cell) string {
	var b strings.Builder
	best, near, robust, kept := 0, 0, 0, 0
	for _, c := range all {
		if c.decider.good >= c.rival() {
			best++
		}
		if c.decider.good >= 0.97*c.rival() {
			near++
		} else {
			fmt.Fprintf(&b, "below: %s %.3f\n", c, c.decider.good/c.rival())
		}
		if c.robust.good >= 0.9*c.rival() {
			robust++
		} else {
			fmt.Fprintf(&b, "with errors: %s %.3f\n", c, c.robust.good/c.rival())
		}
		if c.late(c.decider.itl) && !(c.late(c.always.itl) && c.late(c.never.itl)) {
			fmt.Fprintf(&b, "itl: %s always %.0f (%.2f) never %.0f (%.2f) decider %.0f (%.2f)\n", c, 1e3*c.always.itl, c.always.good, 1e3*c.never.itl, c.never.good, 1e3*c.decider.itl, c.decider.good)
		} else {
			kept++
		}
	}
	fmt.Fprintf(&b, "%d cells: best %d, near %d, robust %d, itl kept %d\n", len(all), best, near, robust, kept)
	return b.String()
}
