// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"image/color"
	"os"
	"path/filepath"
	"strings"
	"time"

	_ "embed"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"

	"github.com/pdkit/pdkit/cmd/pdctl/simulate"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Whether several gateways herd: docs/herding.md. Each of them knows its own requests, and what engines said a lag ago.
const (
	herdSpeed    = 1.5 // times as fast as the trace: near the most that the fleet serves
	herdRequests = 1500
)

// herdIntro is the page's beginning.
//
//go:embed herd.txt
var herdIntro string

// curve is one policy's goodput, by gateways and lag.
type curve struct {
	name string
	by   simulate.Deciding
	good [3][4]float64 // share of the requests that met the objectives
}

func herdGateways() [3]int { return [3]int{1, 2, 4} }

func herdLags() [4]time.Duration {
	return [4]time.Duration{0, 100 * time.Millisecond, time.Second, 5 * time.Second}
}

func herdFleet() simulate.Fleet {
	f := simulate.UsualFleet()
	f.Prefill, f.Decode, f.Zones = 4, 4, 1
	f.Link = model.Link{Latency: .001, BytesPerSecond: 50e9}
	f.CrossLink = f.Link
	return f
}

func herdWorkload() *workload { return &workloads[1] }

func curves() []*curve {
	w, f := herdWorkload(), herdFleet()
	return []*curve{
		{name: "least-load", by: simulate.Deciding{Pick: pick.LeastLoad()}},
		{name: "two-choices", by: simulate.Deciding{Pick: pick.TwoChoices()}},
		{name: "prefix", by: simulate.Deciding{Pick: pick.PrefixAffinity()}},
		{name: "kv", by: simulate.Deciding{KV: true}},
		{name: "decider", by: simulate.Deciding{Pick: pick.PrefixAffinity(),
			Policy: decide.Predicted(decide.PredictedOptions{Chunk: f.DecodeSpec.StepTokens}),
			Class:  decide.Class{TTFT: w.slo.TTFT, ITL: w.slo.TPOT}}},
	}
}

// run plays one place of the curve.
func (c *curve) run(ctx context.Context, gateways int, lag time.Duration) (float64, error) {
	w := herdWorkload()
	t, err := w.make()
	if err == nil {
		err = errors.Join(t.Repeat(herdRequests), t.Speed(herdSpeed))
	}
	if err != nil {
		return 0, err
	}
	by := c.by
	by.Gateways, by.Lag = gateways, lag
	r, err := simulate.Decide(ctx, herdFleet(), t, by, 1)
	if err != nil {
		return 0, err
	}
	return r.Goodput(w.slo) * r.Lasted / herdRequests, nil
}

// share is what is left of the goodput of one gateway without lag.
func (c *curve) share(g, lag int) float64 { return c.good[g][lag] / max(c.good[0][0], 1e-9) }

// herd writes the page and its plot.
func herding(ctx context.Context, folder string) error {
	all := curves()
	for _, c := range all {
		for g, n := range herdGateways() {
			for i, lag := range herdLags() {
				var err error
				if c.good[g][i], err = c.run(ctx, n, lag); err != nil {
					return err
				}
			}
		}
	}
	if err := write(folder, "herding.md", herdPage(all)); err != nil || folder == "" {
		return err
	}
	return herdPicture(filepath.Join(folder, "herding.png"), all)
}

func herdPage(all []*curve) string {
	var b strings.Builder
	fmt.Fprintf(&b, herdIntro, herdRequests)
	b.WriteString("| policy | gateways | lag 0 | 0.1 s | 1 s | 5 s |\n|---|---|---|---|---|---|\n")
	for _, c := range all {
		for g, n := range herdGateways() {
			fmt.Fprintf(&b, "| %s | %d |", c.name, n)
			for i := range c.good[g] {
				fmt.Fprintf(&b, " %s (%.0f) |", percent(c.good[g][i]), 100*c.share(g, i))
			}
			b.WriteString("\n")
		}
	}
	return b.String()
}

// herdPicture draws a plot for each number of gateways.
func herdPicture(file string, all []*curve) error {
	colors := []color.Color{color.RGBA{R: 0x35, G: 0x6f, B: 0xb0, A: 0xff}, color.RGBA{R: 0xd5, G: 0x5e, A: 0xff},
		color.RGBA{G: 0x9e, B: 0x73, A: 0xff}, color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff}, color.Black}
	plots := [][]*plot.Plot{{}}
	for g, n := range herdGateways() {
		p := plot.New()
		p.Title.Text = fmt.Sprintf("%d gateways", n)
		if n == 1 {
			p.Title.Text = "1 gateway"
		}
		p.X.Label.Text, p.Y.Label.Text = "lag", "goodput, % of one gateway without lag"
		p.Y.Min, p.Y.Max = 50, 105
		p.Add(plotter.NewGrid())
		p.NominalX("0", "0.1 s", "1 s", "5 s")
		for i, c := range all {
			var points plotter.XYs
			for lag := range c.good[g] {
				points = append(points, plotter.XY{X: float64(lag), Y: 100 * c.share(g, lag)})
			}
			line, err := plotter.NewLine(points)
			if err != nil {
				return err
			}
			line.Color, line.Width = colors[i], vg.Points(1.5)
			p.Add(line)
			p.Legend.Add(c.name, line)
		}
		p.Legend.Left, p.Legend.XOffs, p.Legend.YOffs, p.Legend.Top = true, vg.Points(6), vg.Points(6), false
		plots[0] = append(plots[0], p)
	}
	img := vgimg.New(27*vg.Centimeter, 9*vg.Centimeter)
	tiles := draw.Tiles{Rows: 1, Cols: len(plots[0]), PadX: vg.Points(8)}
	for i, c := range plot.Align(plots, tiles, draw.New(img))[0] {
		plots[0][i].Draw(c)
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = vgimg.PngCanvas{Canvas: img}.WriteTo(f)
	return errors.Join(err, f.Close())
}
