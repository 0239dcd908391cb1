// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
)

// draw writes a PNG with the ratios of each load: median, quartiles, and the least and the greatest, or what lies far
// out as dots.
func (r *report) draw(file string) error {
	all := slices.Concat(r.compared, r.endpoints)
	if len(all) == 0 {
		return nil
	}
	slices.Reverse(all) // the first load on top
	p := plot.New()
	p.Title.Text = "CPU time, as a ratio to " + all[len(all)-1].base.name
	p.Title.Padding = vg.Points(6)
	grid := plotter.NewGrid()
	grid.Horizontal.Width = 0
	p.Add(grid)
	names := make([]string, len(all))
	for i, c := range all {
		box, err := plotter.NewBoxPlot(vg.Points(14), float64(i), plotter.Values(c.ratios))
		if err != nil {
			return err
		}
		box.Horizontal = true
		p.Add(box)
		names[i] = c.scenario.name
	}
	p.NominalY(names...)
	equal, err := plotter.NewLine(plotter.XYs{{X: 1, Y: -.5}, {X: 1, Y: float64(len(all)) - .5}})
	if err != nil {
		return err
	}
	equal.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
	p.Add(equal)
	return p.Save(24*vg.Centimeter, vg.Length(2+len(all))*vg.Centimeter, file)
}
