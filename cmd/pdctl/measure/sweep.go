// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// Curve is what a sweep measured: a report for each load, in the order of the sweep.
type Curve struct {
	Points []*Report `json:"points"`
}

// Sweep measures one load after the other: rates, or numbers of clients. The end of ctx ends it, with the points until
// then. Each load gets prompts of its own, so that no server knows them from the load before.
func Sweep(ctx context.Context, o Options, loads []Load) (*Curve, error) {
	if len(loads) == 0 {
		return nil, errors.New("no loads")
	}
	c := &Curve{}
	progress := o.Progress
	for i, load := range loads {
		o.Load, o.First = load, i<<32
		if progress != nil {
			o.Progress = func(p Progress) {
				p.Done = (float64(i) + p.Done) / float64(len(loads))
				progress(p)
			}
		}
		r, err := Run(ctx, o)
		if err != nil {
			return nil, err
		}
		if c.Points = append(c.Points, r); r.Interrupted {
			break
		}
	}
	return c, nil
}

// Failed is how many requests of all loads failed.
func (c *Curve) Failed() (n int) {
	for _, r := range c.Points {
		n += r.Failed()
	}
	return n
}

// Stopped reports whether the sweep was interrupted.
func (c *Curve) Stopped() bool { return c.last().Interrupted }

func (c *Curve) last() *Report { return c.Points[len(c.Points)-1] }

// JSON writes the curve as one object.
func (c *Curve) JSON(w io.Writer) error { return writeJSON(w, c) }

// offered is the load of a point in a word.
func offered(l Load) string {
	return strconv.FormatFloat(cmp.Or(l.Rate, float64(l.Clients)), 'g', 6, 64)
}

// columns are the numbers of a point that the table shows.
var columns = []string{"requests/s", "tokens/s", "goodput/s", "TTFT ms p50", "TTFT ms p99", "TPOT ms p50",
	"TPOT ms p99", "E2E ms p50", "E2E ms p99"}

// Table has a row for each load and target, below a row of names.
func (c *Curve) Table() (table [][]string) {
	first := c.Points[0]
	head := []string{"clients"}
	if first.load.Rate > 0 {
		head[0] = "rate"
	}
	if len(first.Targets) > 1 {
		head = append(head, "target")
	}
	list := slices.DeleteFunc(numbers(first.slo), func(n number) bool { return !slices.Contains(columns, n.name) })
	for _, n := range list {
		head = append(head, n.name)
	}
	table = append(table, append(head, "served", "failed"))
	for _, r := range c.Points {
		for i := range r.Targets {
			t := &r.Targets[i]
			row := []string{offered(r.load)}
			if len(r.Targets) > 1 {
				row = append(row, strings.TrimSpace(r.name(i)))
			}
			for _, n := range list {
				row = append(row, digits(n.of(t)))
			}
			table = append(table, append(row, strconv.Itoa(t.Served), strconv.Itoa(t.Failed)))
		}
	}
	return table
}

// Heading tells what was measured.
func (c *Curve) Heading() []string {
	var loads []string
	for _, r := range c.Points {
		loads = append(loads, offered(r.load))
	}
	lines := c.Points[0].Heading()
	lines[len(lines)-1] = fmt.Sprintf("%s; seed %d; %s UTC", c.Points[0].load.sweep(strings.Join(loads, ", ")),
		c.Points[0].Seed, c.Points[0].Date)
	return lines
}

// sweep tells the loads of a sweep, of which l is one.
func (l Load) sweep(of string) string {
	text := "closed loops of " + of + " clients"
	if l.Rate > 0 {
		text = "open loops of " + of + " requests/s (Poisson)"
	}
	return text + l.extent() + " each"
}

// Notes are the sentences below the table: the objectives, the tokens of the first load, and what else was counted.
func (c *Curve) Notes() []string {
	var own [][]string
	for _, r := range c.Points {
		own = append(own, r.counts())
	}
	return slices.Concat(c.Points[0].objectives(), c.Points[0].tokens(), c.grouped(own))
}

// Warnings are those of each load.
func (c *Curve) Warnings() []string {
	var own [][]string
	for _, r := range c.Points {
		own = append(own, r.Warnings)
	}
	return c.grouped(own)
}

// grouped returns each of the points' sentences once, after the loads that it is about.
func (c *Curve) grouped(own [][]string) (all []string) {
	loads := map[string][]string{}
	for i, sentences := range own {
		for _, text := range sentences {
			if loads[text] == nil {
				all = append(all, text)
			}
			loads[text] = append(loads[text], offered(c.Points[i].load))
		}
	}
	for i, text := range all {
		all[i] = strings.Join(loads[text], ", ") + ": " + text
	}
	return all
}

// Text writes the table for people.
func (c *Curve) Text(w io.Writer) error {
	var b strings.Builder
	for _, line := range c.Heading() {
		fmt.Fprintln(&b, line)
	}
	fmt.Fprintln(&b)
	table := c.Table()
	for _, row := range table {
		for i, cell := range row {
			size := 0
			for _, other := range table {
				size = max(size, len(other[i]))
			}
			if i > 0 {
				b.WriteString("  ")
			}
			fmt.Fprintf(&b, "%*s", size, cell)
		}
		fmt.Fprintln(&b)
	}
	fmt.Fprintln(&b)
	writeNotes(&b, c.Notes(), c.Warnings())
	_, err := io.WriteString(w, b.String())
	return err
}

// PNG draws what each time and the goodput become as the servers serve more.
func (c *Curve) PNG(w io.Writer) error {
	slo := c.Points[0].slo
	var plots []*plot.Plot
	for _, d := range []struct {
		title string
		slo   float64
		of    func(*Summary) Quantiles
	}{
		{"Time to first token", ms(slo.TTFT), func(t *Summary) Quantiles { return t.TTFT }},
		{"Time per output token", ms(slo.TPOT), func(t *Summary) Quantiles { return t.TPOT }},
		{"End to end", ms(slo.E2E), func(t *Summary) Quantiles { return t.E2E }},
	} {
		p := empty(d.title, "requests/s that were served", "ms")
		p50 := func(_ Load, t *Summary) (x, y float64) { return t.RequestsPerSecond, d.of(t).P50 }
		p99 := func(_ Load, t *Summary) (x, y float64) { return t.RequestsPerSecond, d.of(t).P99 }
		err := errors.Join(c.line(p, "p50", nil, p50), c.line(p, "p99", dotted, p99), finish(p, d.slo))
		if err != nil {
			return err
		}
		plots = append(plots, p)
	}
	x := "clients"
	if c.Points[0].load.Rate > 0 {
		x = "requests/s that were sent"
	}
	p := empty("Served", x, "requests/s")
	err := c.line(p, "served", nil, func(l Load, t *Summary) (float64, float64) {
		return cmp.Or(l.Rate, float64(l.Clients)), t.RequestsPerSecond
	})
	if err == nil && slo != (SLO{}) {
		err = c.line(p, "goodput", dotted, func(l Load, t *Summary) (float64, float64) {
			return cmp.Or(l.Rate, float64(l.Clients)), *t.Goodput
		})
	}
	if err := errors.Join(err, finish(p, 0)); err != nil {
		return err
	}
	return drawn(w, append(plots, p))
}

var dotted = []vg.Length{vg.Points(1.5), vg.Points(2.5)}

// line draws a number of each point, a line for each target.
func (c *Curve) line(p *plot.Plot, name string, dashes []vg.Length, of func(Load, *Summary) (x, y float64)) error {
	for i := range c.Points[0].Targets {
		var points plotter.XYs
		for _, r := range c.Points {
			if t := &r.Targets[i]; t.Served > 0 {
				x, y := of(r.load, t)
				points = append(points, plotter.XY{X: x, Y: y})
			}
		}
		if len(points) == 0 {
			continue
		}
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return err
		}
		line.Color, line.Width, line.Dashes = colours[i], vg.Points(1.6), dashes
		dots.Color, dots.Shape, dots.Radius = colours[i], draw.CircleGlyph{}, vg.Points(2)
		p.Add(line, dots)
		p.Legend.Add(c.Points[0].name(i)+name, line)
	}
	return nil
}

// finish draws the SLO over the whole width and puts the legend above all lines.
func finish(p *plot.Plot, slo float64) error {
	p.X.Min, p.Y.Min = 0, 0
	p.X.Max, p.Y.Max = max(1.05*p.X.Max, 1), max(1.05*p.Y.Max, 1)
	if slo > 0 && slo <= 3*p.Y.Max {
		line, err := plotter.NewLine(plotter.XYs{{X: 0, Y: slo}, {X: p.X.Max, Y: slo}})
		if err != nil {
			return err
		}
		line.Color, line.Dashes = ink, dashed
		p.Add(line)
		p.Legend.Add("SLO", line)
		p.Y.Max = max(p.Y.Max, 1.05*slo)
	}
	p.Legend.Top, p.Legend.Left, p.Legend.XOffs = true, true, vg.Points(6)
	p.Y.Max *= 1.4
	return nil
}
