// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"errors"
	"image/color"
	"os"
	"path/filepath"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
)

// Draw writes the three plots of docs/picking.md.
func Draw(folder string, results []*Result) error {
	return errors.Join(os.MkdirAll(folder, 0o750),
		bars(filepath.Join(folder, "picking-reuse.png"), "Prompt tokens found in the prefill engine's cache", "%",
			results, (*Result).Reuse),
		bars(filepath.Join(folder, "picking-balance.png"), "Most loaded prefill engine over the mean (computing time)",
			"max / mean", results,
			func(r *Result) float64 { return imbalance(r.PrefillBusy) }),
		tails(filepath.Join(folder, "picking-tail.png"), results))
}

// bars draws a bar for each policy.
func bars(file, title, axis string, results []*Result, of func(*Result) float64) error {
	p := plot.New()
	p.Title.Text, p.Y.Label.Text, p.Y.Min = title, axis, 0
	values, names := make(plotter.Values, len(results)), make([]string, len(results))
	for i, r := range results {
		values[i], names[i] = of(r), r.Policy
	}
	b, err := plotter.NewBarChart(values, vg.Points(28))
	if err != nil {
		return err
	}
	b.Color, b.LineStyle.Width = color.RGBA{R: 0x35, G: 0x6f, B: 0xb0, A: 0xff}, 0
	p.Add(plotter.NewGrid(), b)
	p.NominalX(names...)
	p.X.Min, p.X.Max, p.Y.Max = -.7, float64(len(results))-.3, 1.1*slices.Max(values)
	p.Title.Padding = vg.Points(8)
	return p.Save(20*vg.Centimeter, 9*vg.Centimeter, file)
}

// palette is that of Okabe and Ito, which colour-blind readers can tell apart, too.
var palette = []color.Color{
	color.RGBA{A: 0xff}, color.RGBA{R: 0xe6, G: 0x9f, A: 0xff}, color.RGBA{R: 0x56, G: 0xb4, B: 0xe9, A: 0xff},
	color.RGBA{G: 0x9e, B: 0x73, A: 0xff}, color.RGBA{R: 0xf0, G: 0xe4, B: 0x42, A: 0xff},
	color.RGBA{G: 0x72, B: 0xb2, A: 0xff},
	color.RGBA{R: 0xd5, G: 0x5e, A: 0xff}, color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff},
	color.RGBA{R: 0x88, G: 0x88, B: 0x88, A: 0xff},
}

// tails draws, for each time, the share of requests that wait longer than that for their first token. Lower is better.
func tails(file string, results []*Result) error {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = "Time to first token", "seconds",
		"share of requests that wait longer"
	p.Y.Scale, p.Y.Tick.Marker, p.Y.Max = plot.LogScale{}, plot.LogTicks{Prec: -1}, 1
	p.Legend.Top, p.Legend.XOffs, p.Legend.ThumbnailWidth = true, vg.Points(-8), vg.Points(30)
	p.Title.Padding = vg.Points(8)
	for i, r := range results {
		n := len(r.TTFT)
		var points plotter.XYs
		for k := 0; k < n*999/1000; k += max(n/500, 1) {
			points = append(points, plotter.XY{X: r.TTFT[k], Y: 1 - float64(k)/float64(n)})
		}
		if len(points) == 0 {
			continue
		}
		line, err := plotter.NewLine(points)
		if err != nil {
			return err
		}
		line.Color, line.Dashes, line.Width = palette[i%len(palette)], plotutil.Dashes(i/len(palette)), vg.Points(1.5)
		p.Add(line)
		p.Legend.Add(r.Policy, line)
	}
	p.Add(plotter.NewGrid())
	return p.Save(20*vg.Centimeter, 12*vg.Centimeter, file)
}
