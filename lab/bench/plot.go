// SPDX-License-Identifier: Apache-2.0

package main

import (
	"image/color"
	"path/filepath"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
)

// picture is a plot that was drawn.
type picture struct{ title, file string }

// draw writes a PNG for each group of loads: STEM-requests.png, STEM-streams.png and STEM-endpoints.png.
func (r *report) draw(stem string) error {
	groups := []struct {
		name, title string
		loads       []compared
	}{
		{"requests", "CPU time per request, as a ratio to ", only(r.compared, false)},
		{"streams", "CPU time per streamed chunk, as a ratio to ", only(r.compared, true)},
		{"endpoints", "CPU time per request with many endpoints, as a ratio to each gateway with two", r.endpoints},
	}
	for _, g := range groups {
		if len(g.loads) == 0 {
			continue
		}
		if g.name != "endpoints" {
			g.title += g.loads[0].base.name
		}
		file := stem + "-" + g.name + ".png"
		if err := drawRatios(g.title, g.loads, file); err != nil {
			return err
		}
		r.pictures = append(r.pictures, picture{g.title, filepath.Base(file)})
	}
	return nil
}

func only(all []compared, stream bool) []compared {
	return slices.DeleteFunc(slices.Clone(all), func(c compared) bool { return c.scenario.stream != stream })
}

// colours of the programs, which people who see no red or no green can tell apart.
var colours = []color.Color{
	color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff}, color.RGBA{R: 0xe6, G: 0x9f, A: 0xff},
	color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff},
}

// drawRatios draws a row for each load, and in it a box for each program: median, quartiles, and the least and the
// greatest, or what lies far out as dots.
func drawRatios(title string, loads []compared, file string) error {
	p := plot.New()
	p.Title.Text = title
	p.Title.Padding = vg.Points(6)
	// One gateway may cost thirty times what another does.
	p.X.Scale = plot.LogScale{}
	grid := plotter.NewGrid()
	grid.Horizontal.Width = 0
	p.Add(grid)
	rows := 1 + len(loads[0].peers)
	labels := make([]string, len(loads))
	for i, c := range loads {
		at := len(loads) - 1 - i // the first load on top
		labels[at] = " " + c.scenario.name + "  "
		programs := append([]rival{{series: c.subject, ratios: c.ratios}}, c.peers...)
		for j, program := range programs {
			y := float64(at) + 0.8*((float64(rows)-1)/2-float64(j))/float64(rows)
			if err := addBox(p, y, program.ratios, colours[j%len(colours)]); err != nil {
				return err
			}
			if i == 0 && rows > 1 {
				p.Legend.Add(program.name, &plotter.Polygon{Color: colours[j%len(colours)]})
			}
		}
	}
	p.NominalY(labels...)
	equal, err := plotter.NewLine(plotter.XYs{{X: 1, Y: -.5}, {X: 1, Y: float64(len(loads)) - .5}})
	if err != nil {
		return err
	}
	equal.Dashes = []vg.Length{vg.Points(4), vg.Points(3)}
	p.Add(equal)
	p.X.Min, p.X.Max = min(p.X.Min, 0.9)/1.05, max(p.X.Max, 1.2)*1.05
	p.X.Tick.Marker = ratioTicks(p.X.Max / p.X.Min)
	if rows > 1 {
		p.Y.Max++ // room for the legend
		p.Legend.Top = true
	}
	return p.Save(24*vg.Centimeter, vg.Length(3+0.4*float64(len(loads)*(1+rows)))*vg.Centimeter, file)
}

func addBox(p *plot.Plot, y float64, ratios []float64, fill color.Color) error {
	if len(ratios) == 0 {
		return nil // the table says why
	}
	box, err := plotter.NewBoxPlot(vg.Points(9), y, plotter.Values(ratios))
	if err != nil {
		return err
	}
	box.Horizontal, box.FillColor = true, fill
	p.Add(box)
	return nil
}

// ratioTicks are dense if the ratios lie within a factor of 5, and sparse if some gateway costs 30 times another.
func ratioTicks(width float64) plot.ConstantTicks {
	at := []float64{0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100}
	if width < 5 {
		at = []float64{0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, 3, 4, 5}
	}
	var ticks plot.ConstantTicks
	for _, v := range at {
		ticks = append(ticks, plot.Tick{Value: v, Label: strconv.FormatFloat(v, 'g', -1, 64)})
	}
	return ticks
}
