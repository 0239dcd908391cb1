// SPDX-License-Identifier: Apache-2.0

package main

import (
	"image/color"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// picture writes the plot: each cell's goodput with the decider, against that of the best of the others.
func picture(file string, all []*cell) error {
	p := plot.New()
	p.Title.Text = "Requests that met the objectives"
	p.X.Label.Text, p.Y.Label.Text = "best of always, never and the thresholds, %", "decider, %"
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, 100, 0, 100
	p.Legend.XOffs, p.Legend.Padding = vg.Points(-8), vg.Points(2)
	p.Title.Padding = vg.Points(8)
	even, err := plotter.NewLine(plotter.XYs{{X: 0, Y: 0}, {X: 100, Y: 100}})
	if err != nil {
		return err
	}
	p.Add(plotter.NewGrid(), even)
	shapes := []draw.GlyphDrawer{draw.CircleGlyph{}, draw.BoxGlyph{}, draw.PyramidGlyph{}}
	colors := []color.Color{color.RGBA{R: 0x35, G: 0x6f, B: 0xb0, A: 0xff}, color.RGBA{R: 0xd5, G: 0x5e, A: 0xff},
		color.RGBA{G: 0x9e, B: 0x73, A: 0xff}}
	for i := range workloads {
		var points plotter.XYs
		for _, c := range all {
			if c.w == &workloads[i] {
				points = append(points, plotter.XY{X: 100 * c.rival(), Y: 100 * c.decider.good})
			}
		}
		if len(points) == 0 {
			continue
		}
		s, err := plotter.NewScatter(points)
		if err != nil {
			return err
		}
		s.Shape, s.Color, s.Radius = shapes[i], colors[i], vg.Points(3)
		p.Add(s)
		p.Legend.Add(workloads[i].name, s)
	}
	return p.Save(14*vg.Centimeter, 12*vg.Centimeter, file)
}
