// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"image/color"
	"math"
	"os"
	"slices"
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
const pageWhy = `
Without admission the queue in front of the prefill engine grows until each request in it runs into its timeout just when its turn comes: the engine is busy all the time, with prompts whose clients get 504. With admission few requests wait, and the rest know at once.
`

//nolint:lll // prose: one paragraph a line
const pageCold = `
## From the first second

Three times the capacity comes at once, to engines of which the gateway knows nothing yet. Clients give up after 4 s. *prefill* is the pair above. *batch* takes 200 ms for a prompt and computes 16 of them at a time, so a request that waits for nothing takes 400 ms. With *decode* the decode engine is the narrow place: it has 16 slots, of 200 ms each. Simulated, all are calls in simulated time; over HTTP, clients, gateway and engines speak HTTP over loopback in real time, in one process. Latencies are p50, p95 and p99 until the response's end, in milliseconds, of requests that came in the first second, and of those that came later.

| engines | time | first second | later | responses in each second after the first | refused | of these: queue full | gave up | failed |
|---|---|---|---|---|---|---|---|---|
%s
Until the first responses have come, the gateway knows neither the engines' pace nor how many requests they compute at a time. So a queue that is bounded by a time it cannot estimate yet would fill. Adaptive bounds the number of requests that wait for engines, which holds at any pace.
`

//nolint:lll // prose: one paragraph a line
const pageTail = `
## What the limits do

- Admission is off by default, although nothing is refused at 0.8 of capacity: a gateway should refuse requests only if its operator asked for that. A gateway without it says when goodput collapses, that is when a quarter of the attempts of the last 10 s came too late: by a line of the log, the metric ` + "`pd.goodput.collapsing`" + ` and the alert [PDGoodputCollapses](../runbook.md#pdgoodputcollapses).
- Admission decides when the picker picks the pair, before the flow sends anything. It does not refuse a request's further attempts.
- ` + "`inFlightPerPrefill`" + ` counts until the prefill leg has ended, ` + "`inFlightPerDecode`" + ` until the response has. With mode fixed they are the limits; with adaptive the limits never get higher. The documentation of package ` + "`pdflow/admit`" + ` says how adaptive finds them.
- An engine at its limit is preferred to one in a cooldown: requests wait for it, and a dead engine does not get what the others have no room for.
- With the gateway's ` + "`-inspect`" + `, each decode engine's own load counts too, read every second: one whose KV cache is above 95 % gets nothing while it serves other requests, and adaptive takes an engine's own queue for a limit that was too high. Without it adaptive learns that a decode engine has too much to do only when responses end: a request that waits there gets its first byte no sooner than another one's last.
- ` + "`queue`" + ` requests per ModelServer wait for at most ` + "`queueTimeout`" + `, first come first served. Admission refuses a request at its arrival if, at the queue's pace, it would wait longer; adaptive does so where 24 requests wait already, then 8 until the overload is over: more if prompts differ in length, and as many as leave within 100 ms if the fleet's pace is known to be higher. Requests that wait for one engine alone, as those that refer to a response that it has, are counted for that engine by itself, and take nobody else's place. Which client sent a request does not count, and its priority only where ` + "`priorityHeader`" + ` names a header that a proxy in front sets or takes away: the least number goes first, and takes the last one's place in a full queue.
- Refused: 503, code ` + "`overloaded`" + `, and ` + "`Retry-After`" + `: when all that wait will have been served, at the queue's pace, and at least 1 s. ` + "`fallback`" + ` does not apply, since it would send the request to the same engines.
- Metrics: ` + "`pd.admission.queued`, `pd.admission.wait`, `pd.admission.refused`" + ` ([metrics.md](../metrics.md)).

` + "`lab/overload`" + `'s test runs the same loads in simulated time, also with prompts that differ in length and with decode as the narrow place: without admission goodput falls below 40 % of capacity; with it nothing is refused at 0.8 of capacity, and at 3 times capacity goodput stays above 80 %, the p99 below twice that of 0.8, and refusals below 5 ms.
`

// page is the table, as Markdown.
// by is the command that made it, and about says what time it is measured in.
func page(r run, points []point, cold []string, by, about string) string {
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
	b.WriteString(pageWhy)
	if len(cold) > 0 {
		fmt.Fprintf(&b, pageCold, strings.Join(cold, ""))
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

// coldRow is a row of the table of cold starts.
func coldRow(r run, res *result) string {
	ms := func(sorted []float64) string {
		return fmt.Sprintf("%.0f, %.0f, %.0f", 1000*quantile(sorted, .5), 1000*quantile(sorted, .95),
			1000*quantile(sorted, .99))
	}
	var later []float64
	least, most := math.MaxInt, 0
	for _, s := range res.seconds[1:int(r.lasts.Seconds())] {
		later = append(later, s.took...)
		least, most = min(least, s.served), max(most, s.served)
	}
	slices.Sort(later)
	how := "simulated"
	if r.http {
		how = "over HTTP"
	}
	return fmt.Sprintf("| %s | %s | %s | %s | %d to %d | %d | %d | %d | %d |\n", r.by, how, ms(res.seconds[0].took),
		ms(later), least, most, res.refused, res.full, res.gone, res.failed)
}
