// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/pdkit/pdkit/cmd/pdctl/simulate"
)

const head = "| round | change | to | TTFT p99, predicted | measured | goodput, predicted | measured | signs |\n" +
	"|---|---|---|---|---|---|---|---|\n"

// alike reports whether the predicted sign of the change of TTFT p99, and of goodput, is the measured one.
func (t *trial) alike(i int) (ttft, goodput bool) {
	p, m := t.predicted[i], t.measured[i]
	return (p.TTFTP99 > t.replayed.TTFTP99) == (m.TTFTP99 > t.came.TTFTP99),
		(p.Goodput > t.replayed.Goodput) == (m.Goodput > t.came.Goodput)
}

// rows are those of a round: first the recorded set-up, then the changes.
func (t *trial) rows(round int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| %d | | %s | %.2f s | %.2f s | %.1f %% | %.1f %% | |\n", round, &recordedSetUp,
		t.replayed.TTFTP99, t.came.TTFTP99, 100*t.replayed.Goodput, 100*t.came.Goodput)
	for i, c := range t.changes {
		say := "alike"
		if ttft, goodput := t.alike(i); !ttft || !goodput {
			say = "**differ**"
		}
		by := func(after, before simulate.Shown) (ttft, goodput string) {
			return fmt.Sprintf("%.2f s (%+.0f %%)", after.TTFTP99, 100*(after.TTFTP99/before.TTFTP99-1)),
				fmt.Sprintf("%.1f %% (%+.1f)", 100*after.Goodput, 100*(after.Goodput-before.Goodput))
		}
		pt, pg := by(t.predicted[i], t.replayed)
		mt, mg := by(t.measured[i], t.came)
		fmt.Fprintf(&b, "| %d | %s | %s | %s | %s | %s | %s | %s |\n", round, c.name, &c.to, pt, mt, pg, mg, say)
	}
	return b.String()
}
