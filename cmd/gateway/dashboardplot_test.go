// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Pixels: a column and a row of Grafana's grid of 24, the gap between panels, and where the curves are in a panel.
const (
	column, line, gap          = 52, 26, 10
	plotLeft, plotTop, plotEnd = 78, 34, 14
	plotHeight                 = 90
)

var reds = []string{"#c9403a", "#e39a92", "#8a2622", "#f0c4be"}

var colours = []string{"#4477aa", "#d29922", "#3c9a6e", "#a8327a", "#5fa8c4", "#7a6bb0", "#8a94a0", "#8c6d46"}

// A unit of Grafana's: how its name follows a number, and whether small and large numbers get a prefix.
var units = map[string]struct {
	suffix       string
	factor       float64
	small, large bool
}{
	"s": {"s", 1, true, false}, "short": {"", 1, false, true}, "reqps": {"req/s", 1, false, true},
	"Bps": {"B/s", 1, false, true}, "decbytes": {"B", 1, false, true}, "percentunit": {"%", 100, false, false},
	tokens: {"tok/s", 1, false, true},
}

func inUnit(unit string, v float64) string {
	u, prefix := units[unit], ""
	v *= u.factor
	for _, p := range []string{"m", "µ"} {
		if u.small && v > 0 && v < 0.9995 {
			v, prefix = v*1000, p
		}
	}
	for _, p := range []string{"k", "M", "G"} {
		if u.large && v >= 1000 {
			v, prefix = v/1000, p
		}
	}
	return strings.TrimSpace(strconv.FormatFloat(math.Round(v*1000)/1000, 'f', -1, 64) + " " + prefix + u.suffix)
}

// plot draws the series with the axes' marks.
func (f *figure) plot(p drawable, all []series, from time.Time) {
	f.Left, f.Right, f.Top, f.Bottom = plotLeft, f.W-plotEnd, plotTop, plotTop+plotHeight
	f.Empty = p.FieldConfig.Defaults.NoValue
	stacked, seconds := p.FieldConfig.Defaults.Custom == areas, 0
	var bases [][]float64
	highest := p.FieldConfig.Defaults.Max
	for i, s := range all {
		seconds = len(s.values)
		base := make([]float64, seconds)
		for at := range s.values {
			if stacked && i > 0 { // one upon the other; what has no value adds nothing
				base[at] = bases[i-1][at]
				if v := all[i-1].values[at]; !math.IsNaN(v) {
					base[at] += v
				}
			}
			if v := base[at] + s.values[at]; p.FieldConfig.Defaults.Max == 0 && v > highest {
				highest = v
			}
		}
		bases = append(bases, base)
	}
	step := nice(highest/3, p.FieldConfig.Defaults.Unit == "short")
	top := max(1, math.Ceil(highest/step-1e-9)) * step
	x := func(at int) float64 {
		return plotLeft + float64(at)/float64(max(1, seconds-1))*float64(f.Right-plotLeft)
	}
	y := func(v float64) float64 { return float64(f.Bottom) - v/top*plotHeight }
	for v := 0.; len(all) > 0 && v <= top*1.001; v += step {
		f.Ticks = append(f.Ticks, mark{plotLeft - 8, y(v), inUnit(p.FieldConfig.Defaults.Unit, v)})
	}
	for at := range seconds {
		when := from.Add(time.Duration(at) * time.Second)
		if when.Unix()%30 == 0 && x(at) > plotLeft+30 { // a label further left is below those of the values
			f.Times = append(f.Times, mark{x(at), f.Bottom + 18, when.Format(time.TimeOnly)})
		}
	}
	shade := 0
	for i, s := range all {
		c := curve{Name: s.name, Colour: colours[i%len(colours)]}
		if s.red {
			c.Colour, shade = reds[shade%len(reds)], shade+1
		}
		for at := 0; at < seconds; at++ {
			var line, back string
			for ; at < seconds && !math.IsNaN(s.values[at]); at++ {
				line += fmt.Sprintf("L%.1f %.1f", x(at), y(bases[i][at]+s.values[at]))
				back = fmt.Sprintf("L%.1f %.1f", x(at), y(bases[i][at])) + back
			}
			if line != "" {
				if stacked {
					c.Area += "M" + line[1:] + back + "Z"
				} else {
					c.Line += "M" + line[1:]
				}
			}
		}
		f.Curves = append(f.Curves, c)
	}
}

// nice is the next of 1, 2, 5, 10 … that is not less.
func nice(v float64, whole bool) float64 {
	if v <= 0 || whole && v < 1 {
		return 1
	}
	ten := math.Pow(10, math.Floor(math.Log10(v)))
	for _, n := range []float64{1, 2, 5} {
		if n*ten >= v*(1-1e-9) {
			return n * ten
		}
	}
	return 10 * ten
}
