// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
)

// What the drawing takes from the dashboard's file, in Grafana's names.
type drawable struct {
	Title, Type string
	GridPos     struct{ X, Y, W, H int }
	FieldConfig struct {
		Overrides []override
		Defaults  struct {
			Unit, NoValue string
			Max           float64
			Custom        style
		}
	}
	Targets []struct{ RefID, Expr, LegendFormat string }
}

type override struct {
	Matcher    struct{ ID, Options string }
	Properties []struct {
		ID    string
		Value struct{ Mode, FixedColor string }
	}
}

type style struct {
	LineWidth, FillOpacity float64
	Stacking               struct{ Mode string }
}

// The two styles that the template draws.
var (
	lines = style{2, 0, struct{ Mode string }{"none"}}
	areas = style{0, 70, struct{ Mode string }{"normal"}}
)

// series has a value for each second; NaN where there is none. Name and red are the drawing's.
type series struct {
	labels map[string]string
	values []float64
	name   string
	red    bool
}

// Of the template.
type (
	mark   struct{ X, Y, Text any }
	curve  struct{ Name, Colour, Line, Area string } // a line, or an area upon those before it
	figure struct {
		Title, Empty             string
		Row                      bool
		X, Y, W, H               int
		Left, Right, Top, Bottom int
		Ticks, Times             []mark
		Curves                   []curve
	}
	sheet struct {
		Title, Model, From, To string
		W, H                   int
		Figures                []figure
	}
)

//go:embed testdata/dashboard.html
var pageOfDashboard string

// drawDashboard returns the dashboard's file as a page. Over asks Prometheus for a query's values at each second.
func drawDashboard(from, to time.Time, window string, over func(expr string) ([]series, error)) ([]byte, error) {
	data, err := os.ReadFile(dashboardFile)
	if err != nil {
		return nil, err
	}
	var file struct {
		Title  string
		Panels []drawable
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, err
	}
	s := sheet{Title: file.Title, Model: "tiny", From: from.Format(time.TimeOnly), To: to.Format(time.TimeOnly),
		W: 24 * column}
	for _, p := range file.Panels {
		f := figure{Title: p.Title, Row: p.Type == "row", X: p.GridPos.X * column, Y: p.GridPos.Y * line,
			W: p.GridPos.W*column - gap, H: p.GridPos.H*line - gap}
		if !f.Row {
			all, err := seriesOf(p, window, over)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.Title, err)
			}
			f.plot(p, all, from)
		}
		s.H = max(s.H, f.Y+f.H)
		s.Figures = append(s.Figures, f)
	}
	var page bytes.Buffer
	err = template.Must(template.New("dashboard").Parse(pageOfDashboard)).Execute(&page, s)
	return page.Bytes(), err
}

var placeholder = regexp.MustCompile(`\{\{(\w+)\}\}`)

// seriesOf asks for a panel's series, and names them. What the drawing does not know is an error, so that the picture
// never lacks silently what Grafana shows.
func seriesOf(p drawable, window string, over func(string) ([]series, error)) (all []series, err error) {
	defaults := p.FieldConfig.Defaults
	switch _, known := units[defaults.Unit]; {
	case p.Type != "timeseries":
		return nil, fmt.Errorf("the drawing does not know type %q", p.Type)
	case !known:
		return nil, fmt.Errorf("the drawing does not know unit %q", defaults.Unit)
	case defaults.Custom != lines && defaults.Custom != areas:
		return nil, fmt.Errorf("the drawing does not know the style %+v", defaults.Custom)
	case p.Title == "" || defaults.NoValue == "" || len(p.Targets) == 0:
		return nil, fmt.Errorf("has no title, no noValue, or no query: %+v", p)
	}
	red := ""
	for _, o := range p.FieldConfig.Overrides {
		if fmt.Sprint(o.Matcher.ID, o.Properties) != "byFrameRefID[{color {shades red}}]" {
			return nil, fmt.Errorf("the drawing does not know the override %+v", o)
		}
		red = o.Matcher.Options
	}
	for _, target := range p.Targets {
		for _, m := range placeholder.FindAllStringSubmatch(target.LegendFormat, -1) {
			if strings.Contains(target.Expr, "by (") && !regexp.MustCompile(`by \([^)]*\b`+m[1]+`\b`).
				MatchString(target.Expr) {
				return nil, fmt.Errorf("the legend %q has a label that %q sums up", m[1], target.Expr)
			}
		}
		found, err := over(strings.NewReplacer("$__rate_interval", window, "$model", "tiny").Replace(target.Expr))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", target.Expr, err)
		}
		for _, s := range found {
			name := strings.TrimSpace(placeholder.ReplaceAllStringFunc(target.LegendFormat, func(m string) string {
				return s.labels[strings.Trim(m, "{}")]
			}))
			if name == "" || slices.ContainsFunc(all, func(other series) bool { return other.name == name }) {
				return nil, fmt.Errorf("%v has no legend, or another's: %q", s.labels, name)
			}
			s.name, s.red = name, target.RefID == red
			all = append(all, s)
		}
	}
	return all, nil
}
