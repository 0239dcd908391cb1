// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"image/color"
	"math"
	"os"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

//nolint:lll // prose: one paragraph a line
const pageHead = `# Overload

<!-- Written by lab/overload: %s -->

One prefill and one decode engine serve %.0f requests a second. Requests come at random (Poisson), %s for each load, and no client waits for another. ` + "`timeouts.prefill`" + ` is %s. Without admission all go to the engines; with it (` + "`spec.admission: {mode: adaptive}`" + `, or ` + "`admit.New`" + ` around a picker) the flow refuses requests for which the engines have no room. The figures leave out the first quarter of each run, in which adaptive finds the limits. Goodput is whole responses a second. Latencies are in milliseconds, of requests that were served; a refusal's latency is the time until the client has its 503. %s

![Overload](overload.png)

| load | goodput without | p99 without | failed without | goodput with | p99 with | first byte p99 with | refused | refusal p99 |
|---|---|---|---|---|---|---|---|---|
`

//nolint:lll // prose: one paragraph a line
const pageTail = `
Without admission the queue in front of the prefill engine grows until each request in it runs into its timeout just when its turn comes: the engine is busy all the time, with prompts whose clients get 504. With admission few requests wait, and the rest know at once.

## What the limits do

- Admission is off by default, although nothing is refused at 0.8 of capacity: a gateway should refuse requests only if its operator asked for that. A gateway without it says when goodput collapses, that is when a quarter of the attempts of the last 10 s came too late: by a line of the log, the metric ` + "`pd.goodput.collapsing`" + ` and the alert [PDGoodputCollapses](../runbook.md#pdgoodputcollapses).
- Admission decides when the picker picks the pair, before the flow sends anything. It does not refuse a request's further attempts.
- ` + "`inFlightPerPrefill`" + ` counts until the prefill leg has ended, ` + "`inFlightPerDecode`" + ` until the response has. With mode fixed they are the limits; with adaptive the limits never get higher. The documentation of package ` + "`pdflow/admit`" + ` says how adaptive finds them.
- With the gateway's ` + "`-inspect`" + `, each decode engine's own load counts too, read every second: one whose KV cache is above 95 % gets nothing while it serves other requests, and adaptive takes an engine's own queue for a limit that was too high.
- ` + "`queue`" + ` requests per ModelServer wait for at most ` + "`queueTimeout`" + `, first come first served. Admission refuses a request at its arrival if, at the queue's pace, it would wait longer; adaptive does so from a wait of 24 prefills on, then of 8 until the overload is over. Which client sent a request does not count, and its priority only where ` + "`priorityHeader`" + ` names a header that a proxy in front sets or takes away: the least number goes first, and takes the last one's place in a full queue.
- Refused: 503, code ` + "`overloaded`" + `, ` + "`Retry-After: 1`" + `. ` + "`fallback`" + ` does not apply, since it would send the request to the same engines.
- Metrics: ` + "`pd.admission.queued`, `pd.admission.wait`, `pd.admission.refused`" + ` ([metrics.md](../metrics.md)).

` + "`lab/overload`" + `'s test runs the same loads in simulated time, also with prompts that differ in length and with decode as the narrow place: without admission goodput falls below 40 % of capacity; with it nothing is refused at 0.8 of capacity, and at 3 times capacity goodput stays above 80 %, the p99 below twice that of 0.8, and refusals below 5 ms.
`

// page is the table, as Markdown.
// by is the command that made it, and about says what time it is measured in.
func page(r run, points []point, by, about string) string {
	var b strings.Builder
	fmt.Fprintf(&b, pageHead, by, r.capacity, r.lasts, r.timeout, about)
	ms := func(sorted []float64) string {
		if len(sorted) == 0 {
			return ""
		}
		return fmt.Sprintf("%.4g", math.Round(quantile(sorted, .99)*1e4)/10)
	}
	share := func(n int, of *result) string {
		return fmt.Sprintf("%.1f %%", 100*float64(n)/float64(max(of.offered, 1)))
	}
	for _, p := range points {
		fmt.Fprintf(&b, "| %.1f | %.1f/s | %s | %s | %.1f/s | %s | %s | %s | %s |\n", p.load, p.without.goodput,
			ms(p.without.took), share(p.without.failed, p.without), p.with.goodput, ms(p.with.took), ms(p.with.first),
			share(p.with.refused, p.with), ms(p.with.refusing))
	}
	b.WriteString(pageTail)
	return b.String()
}

var (
	orange = color.RGBA{R: 0xd5, G: 0x5e, A: 0xff}
	blue   = color.RGBA{G: 0x72, B: 0xb2, A: 0xff}
	grey   = color.RGBA{R: 0x99, G: 0x99, B: 0x99, A: 0xff}
)

// drawing puts goodput above latency in one picture.
func drawing(file string, r run, points []point) error {
	goodput, latency := plot.New(), plot.New()
	goodput.Title.Text, goodput.Y.Label.Text = "Whole responses a second", "goodput, 1/s"
	latency.Title.Text, latency.Y.Label.Text = "p99 of the requests that were served", "seconds"
	latency.X.Label.Text = "offered load, times capacity"
	line := func(p *plot.Plot, name string, c color.Color, of func(point) (float64, bool)) error {
		var xy plotter.XYs
		for _, x := range points {
			if y, ok := of(x); ok {
				xy = append(xy, plotter.XY{X: x.load, Y: y})
			}
		}
		if len(xy) == 0 {
			return nil
		}
		l, dots, err := plotter.NewLinePoints(xy)
		if err != nil {
			return err
		}
		l.Color, l.Width, dots.Color, dots.Shape = c, vg.Points(1.8), c, draw.CircleGlyph{}
		p.Add(l, dots)
		p.Legend.Add(name, l, dots)
		return nil
	}
	for _, p := range []*plot.Plot{goodput, latency} {
		p.Add(plotter.NewGrid())
		p.Y.Min, p.X.Min, p.X.Max = 0, 0, loads[len(loads)-1]+.05
		p.Legend.Left, p.Legend.Top, p.Legend.XOffs = true, true, vg.Points(8)
		p.Title.Padding = vg.Points(6)
	}
	goodput.Legend.Top, goodput.Legend.Left, goodput.Y.Max = false, false, 1.2*r.capacity
	goodput.Legend.XOffs, goodput.Legend.YOffs = vg.Points(-8), vg.Points(8)
	p99 := func(x *result) (float64, bool) { return quantile(x.took, .99), len(x.took) > 0 }
	for _, err := range []error{
		line(goodput, "with admission", blue, func(p point) (float64, bool) { return p.with.goodput, true }),
		line(goodput, "without", orange, func(p point) (float64, bool) { return p.without.goodput, true }),
		line(latency, "with admission", blue, func(p point) (float64, bool) { return p99(p.with) }),
		line(latency, "without", orange, func(p point) (float64, bool) { return p99(p.without) }),
	} {
		if err != nil {
			return err
		}
	}
	ideal := plotter.NewFunction(func(x float64) float64 { return r.capacity * min(x, 1) })
	ideal.Color, ideal.Dashes = grey, []vg.Length{vg.Points(4), vg.Points(3)}
	goodput.Add(ideal)
	goodput.Legend.Add("what the engines can serve", ideal)
	return save(file, goodput, latency)
}

// save writes plots below each other into one PNG.
func save(file string, plots ...*plot.Plot) error {
	img := vgimg.New(18*vg.Centimeter, 18*vg.Centimeter)
	grid := make([][]*plot.Plot, len(plots))
	for i, p := range plots {
		grid[i] = []*plot.Plot{p}
	}
	tiles := draw.Tiles{Rows: len(plots), Cols: 1, PadY: 6 * vg.Millimeter, PadTop: 3 * vg.Millimeter,
		PadRight: 4 * vg.Millimeter}
	for i, row := range plot.Align(grid, tiles, draw.New(img)) {
		plots[i].Draw(row[0])
	}
	return write(file, vgimg.PngCanvas{Canvas: img})
}

func write(file string, picture vgimg.PngCanvas) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	_, err = picture.WriteTo(f)
	return errors.Join(err, f.Close())
}
