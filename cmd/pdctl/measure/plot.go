// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"image/color"
	"io"
	"math"
	"slices"
	"strconv"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

// colours of the targets, which people who see no red or no green can tell apart.
var colours = []color.Color{
	color.RGBA{G: 0x72, B: 0xb2, A: 0xff}, color.RGBA{R: 0xe6, G: 0x9f, A: 0xff},
}

var (
	faint = color.Gray{Y: 0xdd}
	ink   = color.Gray{Y: 0x33}
)

// PNG draws the report: how TTFT, ITL and total time are distributed, and TTFT over the run.
func (r *Report) PNG(w io.Writer) error {
	distributions := []struct {
		title string
		slo   time.Duration
		of    func(*sample) []time.Duration
	}{
		{"Time to first token", r.slo.TTFT, func(s *sample) []time.Duration { return []time.Duration{s.first} }},
		{"Time between tokens", 0, func(s *sample) []time.Duration { return s.gaps }},
		{"Whole response", r.slo.E2E, func(s *sample) []time.Duration { return []time.Duration{s.total} }},
	}
	var plots []*plot.Plot
	for _, d := range distributions {
		p, err := r.distribution(d.title, d.slo, d.of)
		if err != nil {
			return err
		}
		plots = append(plots, p)
	}
	p, err := r.course()
	if err != nil {
		return err
	}
	plots = append(plots, p)
	return drawn(w, plots)
}

// drawn writes four plots as one picture.
func drawn(w io.Writer, plots []*plot.Plot) error {
	canvas := vgimg.NewWith(vgimg.UseWH(26*vg.Centimeter, 18*vg.Centimeter), vgimg.UseDPI(144))
	tiles := draw.Tiles{Rows: 2, Cols: 2, PadX: vg.Points(18), PadY: vg.Points(18), PadTop: vg.Points(8),
		PadBottom: vg.Points(4), PadLeft: vg.Points(6), PadRight: vg.Points(14)}
	grid := [][]*plot.Plot{plots[:2], plots[2:]}
	for row, canvases := range plot.Align(grid, tiles, draw.New(canvas)) {
		for column, c := range canvases {
			grid[row][column].Draw(c)
		}
	}
	_, err := vgimg.PngCanvas{Canvas: canvas}.WriteTo(w)
	return err
}

// empty is a plot without data.
func empty(title, x, y string) *plot.Plot {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, x, y
	p.Title.Padding = vg.Points(8)
	for style, size := range map[*text.Style]vg.Length{&p.Title.TextStyle: 13, &p.X.Label.TextStyle: 10.5,
		&p.Y.Label.TextStyle: 10.5, &p.X.Tick.Label: 10.5, &p.Y.Tick.Label: 10.5, &p.Legend.TextStyle: 10.5} {
		style.Font.Variant, style.Font.Size, style.Color = "Sans", size, ink
	}
	p.X.Tick.Marker, p.Y.Tick.Marker = plot.TickerFunc(ticks), plot.TickerFunc(ticks)
	p.X.Tick.Length, p.Y.Tick.Length = 0, 0
	p.X.Padding, p.Y.Padding = 0, 0 // both axes begin in the corner
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = faint, faint
	p.Add(grid)
	p.X.Min, p.Y.Min = 0, 0
	p.X.LineStyle.Color, p.Y.LineStyle.Color = ink, ink
	return p
}

// ticks marks three to six round numbers.
func ticks(least, most float64) (all []plot.Tick) {
	step := math.Pow(10, math.Floor(math.Log10((most-least)/5)))
	for _, factor := range []float64{1, 2, 5, 10} {
		if (most-least)/(factor*step) <= 6 {
			step *= factor
			break
		}
	}
	decimals := max(0, int(-math.Floor(math.Log10(step))))
	for i := math.Ceil(least / step); i*step <= most*(1+1e-9); i++ {
		all = append(all, plot.Tick{Value: i * step, Label: strconv.FormatFloat(i*step, 'f', decimals, 64)})
	}
	return all
}

// distribution draws the share of times that are at most so long, by about 1,000 points.
func (r *Report) distribution(title string, slo time.Duration, of func(*sample) []time.Duration) (*plot.Plot, error) {
	p := empty(title, "ms", "% of them within")
	p.Y.Max, p.X.Max = 100, 0
	p.Y.Tick.Marker = plot.TickerFunc(func(float64, float64) []plot.Tick { return ticks(0, 100) })
	named := 0
	name := func(text string, line *plotter.Line) {
		p.Legend.Add(text, line)
		named++
		p.Y.Max = 103 + 8*float64(named) // the legend stands above the curves, which end at 100
	}
	p.Legend.Top, p.Legend.XOffs = true, -vg.Points(6)
	for i := range r.Targets {
		var list []time.Duration
		for j := range r.samples {
			if s := &r.samples[j]; s.target == i && s.fault == "" {
				list = append(list, of(s)...)
			}
		}
		if len(list) == 0 {
			continue
		}
		slices.Sort(list)
		var points plotter.XYs
		for k := 0; k < len(list); k += max(len(list)/1000, 1) {
			points = append(points, plotter.XY{X: ms(list[k]), Y: 100 * float64(k+1) / float64(len(list))})
		}
		line, err := plotter.NewLine(points)
		if err != nil {
			return nil, err
		}
		line.Color, line.Width, line.StepStyle = colours[i], vg.Points(1.6), plotter.PreStep
		p.Add(line)
		p.X.Max = max(p.X.Max, 1.03*points[len(points)-1].X)
		if len(r.Targets) > 1 {
			name(r.name(i), line)
		}
	}
	p.X.Max = max(p.X.Max, 1)
	if slo <= 0 || ms(slo) > 3*p.X.Max { // far from what is drawn
		return p, nil
	}
	line, err := plotter.NewLine(plotter.XYs{{X: ms(slo), Y: 0}, {X: ms(slo), Y: 100}})
	if err != nil {
		return nil, err
	}
	line.Color, line.Dashes = ink, dashed
	p.Add(line)
	p.X.Max = max(p.X.Max, 1.05*ms(slo))
	name("SLO "+slo.String(), line)
	return p, nil
}

var dashed = []vg.Length{vg.Points(4), vg.Points(3)}

// course draws each request's TTFT at its arrival.
func (r *Report) course() (*plot.Plot, error) {
	p := empty("Time to first token over the run", "s since the start, by arrival", "ms")
	for i := range r.Targets {
		var points plotter.XYs
		for j := range r.samples {
			if s := &r.samples[j]; s.target == i && s.fault == "" {
				points = append(points, plotter.XY{X: s.at.Seconds(), Y: ms(s.first)})
			}
		}
		if len(points) == 0 {
			continue
		}
		dots, err := plotter.NewScatter(points)
		if err != nil {
			return nil, err
		}
		dots.Color, dots.Shape, dots.Radius = colours[i], draw.CircleGlyph{}, vg.Points(1.5)
		p.Add(dots)
	}
	p.X.Min, p.Y.Min = 0, 0
	p.X.Max, p.Y.Max = max(p.X.Max, 1), max(1.05*p.Y.Max, 1)
	return p, nil
}
