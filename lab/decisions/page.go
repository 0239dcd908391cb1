// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
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
	}
	return b.String()
}

func percent(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) }

func page(all []*cell, requests int) string { return table(all) }
