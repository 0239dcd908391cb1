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
{{if gt (len .Targets) 1}}<thead><tr><th></th>{{range .Heads}}<th>{{.}}</th>{{end}}</tr></thead>
{{end}}{{range .Rows}}<tr><th>{{.Name}}</th>{{range .Values}}<td>{{.}}</td>{{end}}` +
	`{{if gt (len $.Targets) 1}}<td>{{.Ratio}}</td>{{end}}</tr>
{{end}}</table>
<p>{{range .Notes}}{{.}}<br>
{{end}}</p>
<img alt="Distributions of TTFT, ITL and total time, and TTFT over the run" src="{{.Picture}}">
</html>
`))

// HTML writes the report as one page that needs no other file.
func (r *Report) HTML(w io.Writer) error {
	var picture bytes.Buffer
	if err := r.PNG(&picture); err != nil {
		return err
	}
	encoded := "data:image/png;base64," + base64.StdEncoding.EncodeToString(picture.Bytes())
	return page.Execute(w, struct {
		*Report
		Picture template.URL
	}{r, template.URL(encoded)}) //nolint:gosec // it was made here
}
