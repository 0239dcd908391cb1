// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"bytes"
	"encoding/base64"
	"html/template"
	"io"
)

var page = template.Must(template.New("").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><title>pdctl bench</title>
<meta name="viewport" content="width=device-width">
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.4em } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { border-top: 1px solid #ddd; padding: .25em 1em; text-align: right; font-weight: normal }
th { text-align: left } thead th { text-align: right; color: #666; border: 0 }
img { width: 100%; margin: 1.5em 0 } .warning { color: #a04000 } code { font-size: .95em }
</style>
<h1>pdctl bench</h1>
<p>{{range .Heading}}{{.}}<br>
{{end}}</p>
{{range .Warnings}}<p class="warning">Warning: {{.}}.</p>
{{end}}<table>
{{with .Head}}<thead><tr>{{range .}}<th>{{.}}</th>{{end}}</tr></thead>
{{end}}{{range .Rows}}<tr>{{range $i, $cell := .}}{{if $i}}<td>{{$cell}}</td>{{else}}<th>{{$cell}}</th>{{end}}` +
	`{{end}}</tr>
{{end}}</table>
<p>{{range .Notes}}{{.}}<br>
{{end}}</p>
<img alt="{{.Plots}}" src="{{.Picture}}">
</html>
`))

// content is what a page shows.
type content struct {
	Heading, Warnings, Head []string
	Rows                    [][]string
	Notes                   []string
	Plots                   string // what they show
	Picture                 template.URL
}

// HTML writes the report as one page that needs no other file.
func (r *Report) HTML(w io.Writer) error {
	c := content{Heading: r.Heading(), Warnings: r.Warnings, Notes: r.Notes(),
		Plots: "Distributions of TTFT, ITL and E2E, and TTFT over the run"}
	two := len(r.Targets) > 1
	if two {
		c.Head = append([]string{""}, r.Heads()...)
	}
	for _, line := range r.Rows() {
		row := append([]string{line.Name}, line.Values...)
		if two {
			row = append(row, line.Ratio)
		}
		c.Rows = append(c.Rows, row)
	}
	return c.write(w, r.PNG)
}

// HTML writes the curve as one page that needs no other file.
func (c *Curve) HTML(w io.Writer) error {
	table := c.Table()
	return content{Heading: c.Heading(), Warnings: c.Warnings(), Head: table[0], Rows: table[1:], Notes: c.Notes(),
		Plots: "TTFT, TPOT and E2E by what was served, and what was served of each load"}.write(w, c.PNG)
}

func (c content) write(w io.Writer, png func(io.Writer) error) error {
	var picture bytes.Buffer
	if err := png(&picture); err != nil {
		return err
	}
	encoded := "data:image/png;base64," + base64.StdEncoding.EncodeToString(picture.Bytes())
	c.Picture = template.URL(encoded) //nolint:gosec // it was made here
	return page.Execute(w, c)
}
