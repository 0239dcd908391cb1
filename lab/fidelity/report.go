// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// comparison is a load in virtual and in real time.
type comparison struct{ virtual, real *result }

// objectives are what goodput counts by: about what nine in ten requests reach.
type objectives struct{ ttft, tpot time.Duration }

const head = "| policy | round | TTFT p50 | error | TTFT p99 | error | ITL p50 | error | ITL p99 | error | " +
	"goodput | error | same pair |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"

func quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[int(q*float64(len(sorted)-1))]
}

// good is the share of requests that met the objectives, in percent.
func (r *result) good(by objectives) float64 {
	n := 0
	for i := range r.TTFT {
		if r.TTFT[i] <= by.ttft.Seconds() && r.TPOT[i] <= by.tpot.Seconds() {
			n++
		}
	}
	return 100 * float64(n) / float64(len(r.TTFT))
}

// errors are by how much virtual time is off real time, as shares: of TTFT and ITL at p50 and p99.
func (c *comparison) errors() (ttft50, ttft99, itl50, itl99 float64) {
	off := func(virtual, actual float64) float64 { return virtual/actual - 1 }
	return off(quantile(c.virtual.TTFT, .5), quantile(c.real.TTFT, .5)),
		off(quantile(c.virtual.TTFT, .99), quantile(c.real.TTFT, .99)),
		off(c.virtual.Gaps.Quantile(.5), c.real.Gaps.Quantile(.5)),
		off(c.virtual.Gaps.Quantile(.99), c.real.Gaps.Quantile(.99))
}

// typical are the medians of the errors of TTFT and ITL at p50, without their signs.
func typical(all []*comparison) (ttft, itl float64) {
	var a, b []float64
	for _, c := range all {
		t, _, i, _ := c.errors()
		a, b = append(a, math.Abs(t)), append(b, math.Abs(i))
	}
	return quantile(a, .5), quantile(b, .5)
}

// alike is the share of requests that went to the same pair, in percent.
func (c *comparison) alike() float64 {
	n := 0
	for i := range c.virtual.pairs {
		if c.virtual.pairs[i] == c.real.pairs[i] {
			n++
		}
	}
	return 100 * float64(n) / float64(len(c.virtual.pairs))
}

// row shows what real time gave, and how far virtual time was off.
func (c *comparison) row(policy string, round int, by objectives) string {
	a, b, x, y := c.errors()
	r := c.real
	ms := func(seconds, off float64) string { return fmt.Sprintf("%.4g ms | %+.1f %%", 1000*seconds, 100*off) }
	return fmt.Sprintf("| `%s` | %d | %s | %s | %s | %s | %.1f %% | %+.1f | %.1f %% |\n", policy, round,
		ms(quantile(r.TTFT, .5), a), ms(quantile(r.TTFT, .99), b), ms(r.Gaps.Quantile(.5), x),
		ms(r.Gaps.Quantile(.99), y),
		r.good(by), c.virtual.good(by)-r.good(by), c.alike())
}
