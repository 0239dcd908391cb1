// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"html/template"
	"io"
	"strings"
)

// Verdict is what came out of a case.
type Verdict string

// Verdicts.
const (
	Pass Verdict = "pass"
	Fail Verdict = "fail"
	Skip Verdict = "skip"
)

// Result is what came out of a case.
type Result struct {
	ID       string   `json:"id"`
	Group    string   `json:"group"`
	Severity Severity `json:"severity"`
	Rule     string   `json:"rule"`
	Verdict  Verdict  `json:"verdict"`
	Want     string   `json:"expected,omitempty"` // of a failure
	Saw      string   `json:"saw,omitempty"`      // of a failure; the reason of a skip
	Seconds  float64  `json:"seconds"`
}

// Report is a run's results.
type Report struct {
	Gateway string   `json:"gateway"` // its name and version, as the user gives it
	Date    string   `json:"date"`    // of the run, in UTC: "2026-11-24"
	Results []Result `json:"results"`
}

// Count returns how many cases of a severity have a verdict.
func (r *Report) Count(s Severity, v Verdict) (n int) {
	for _, result := range r.Results {
		if result.Severity == s && result.Verdict == v {
			n++
		}
	}
	return n
}

// Summary is one line.
func (r *Report) Summary() string {
	var parts []string
	for _, s := range []Severity{Must, Should} {
		parts = append(parts, fmt.Sprintf("%s: %d passed, %d failed, %d skipped", s, r.Count(s, Pass), r.Count(s, Fail),
			r.Count(s, Skip)))
	}
	return strings.Join(parts, "; ")
}

// Formats write a report.
var Formats = map[string]func(*Report, io.Writer) error{
	"text": (*Report).Text, "json": (*Report).JSON, "junit": (*Report).JUnit, "html": (*Report).HTML,
}

// Text writes one line for each case, and what failed below it.
func (r *Report) Text(w io.Writer) error {
	var b strings.Builder
	group := ""
	for _, result := range r.Results {
		if result.Group != group {
			group = result.Group
			fmt.Fprintf(&b, "%s\n", group)
		}
		b.WriteString(result.Line())
	}
	fmt.Fprintf(&b, "\n%s\n", r.Summary())
	_, err := io.WriteString(w, b.String())
	return err
}

// Line is a result as text.
func (r Result) Line() string {
	line := fmt.Sprintf("  %-4s  %-6s  %s\n", r.Verdict, r.Severity, r.ID)
	switch r.Verdict {
	case Fail:
		line += fmt.Sprintf("                %s\n                expected %s; saw %s\n", r.Rule, r.Want, r.Saw)
	case Skip:
		line += fmt.Sprintf("                %s\n", r.Saw)
	}
	return line
}

// JSON writes the report as one object.
func (r *Report) JSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

type junitCase struct {
	Name    string     `xml:"name,attr"`
	Class   string     `xml:"classname,attr"`
	Time    string     `xml:"time,attr"`
	Failure *junitText `xml:"failure,omitempty"`
	Skipped *junitText `xml:"skipped,omitempty"`
	Out     string     `xml:"system-out,omitempty"`
}

type junitText struct {
	Message string `xml:"message,attr"`
	Type    string `xml:"type,attr,omitempty"`
}

// JUnit writes the report as JUnit's XML. A failed should is skipped there, with what was seen: JUnit knows no weaker
// failure, and the exit status does not fail for it.
func (r *Report) JUnit(w io.Writer) error {
	type suite struct {
		XMLName  xml.Name    `xml:"testsuite"`
		Name     string      `xml:"name,attr"`
		Tests    int         `xml:"tests,attr"`
		Failures int         `xml:"failures,attr"`
		Skipped  int         `xml:"skipped,attr"`
		Cases    []junitCase `xml:"testcase"`
	}
	s := suite{Name: strings.TrimSpace("pdctl conform " + r.Gateway), Tests: len(r.Results)}
	for _, result := range r.Results {
		c := junitCase{Name: result.ID, Class: "conform." + result.Group, Time: fmt.Sprintf("%.3f", result.Seconds),
			Out: result.Rule}
		switch {
		case result.Verdict == Fail && result.Severity == Must:
			s.Failures++
			c.Failure = &junitText{"expected " + result.Want + "; saw " + result.Saw, "must"}
		case result.Verdict == Fail:
			s.Skipped++
			c.Skipped = &junitText{Message: "should: expected " + result.Want + "; saw " + result.Saw}
		case result.Verdict == Skip:
			s.Skipped++
			c.Skipped = &junitText{Message: result.Saw}
		}
		s.Cases = append(s.Cases, c)
	}
	text, err := xml.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s%s\n", xml.Header, text)
	return err
}

var page = template.Must(template.New("").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><title>pdctl conform {{.Gateway}}</title>
<style>
body { font: 15px/1.4 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; width: 100% } td { border-top: 1px solid #8884; padding: .3em .6em }
td { vertical-align: top } .pass { color: #197a35 } .fail { color: #c01c28 } .skip { color: #777 }
</style>
<h1>pdctl conform {{.Gateway}}</h1>
<p>{{.Date}}. {{.Summary}}.</p>
<table>
{{range .Results}}<tr><td class="{{.Verdict}}">{{.Verdict}}</td><td>{{.Severity}}</td><td><code>{{.ID}}</code></td>
<td>{{.Rule}}{{if eq .Verdict "fail"}}<br>
Expected {{.Want}}; saw {{.Saw}}.{{else if .Saw}}<br>{{.Saw}}.{{end}}</td></tr>
{{end}}</table>
</html>
`))

// HTML writes the report as one page.
func (r *Report) HTML(w io.Writer) error { return page.Execute(w, r) }

// Table writes several reports of the same cases side by side, as Markdown, and what failed below it.
func Table(w io.Writer, reports []*Report) error {
	var b strings.Builder
	b.WriteString("| rule | |")
	for _, r := range reports {
		fmt.Fprintf(&b, " %s |", r.Gateway)
	}
	b.WriteString("\n|---|---|" + strings.Repeat("---|", len(reports)) + "\n")
	for _, first := range reports[0].Results {
		fmt.Fprintf(&b, "| `%s` | %s |", first.ID, first.Severity)
		for _, r := range reports {
			fmt.Fprintf(&b, " %s |", mark(r.find(first.ID).Verdict))
		}
		b.WriteString("\n")
	}
	for _, s := range []Severity{Must, Should} {
		fmt.Fprintf(&b, "| **%s: passed of all** | |", s)
		for _, r := range reports {
			all := r.Count(s, Pass) + r.Count(s, Fail) + r.Count(s, Skip)
			fmt.Fprintf(&b, " **%d of %d** |", r.Count(s, Pass), all)
		}
		b.WriteString("\n")
	}
	for _, r := range reports {
		fmt.Fprintf(&b, "\n### What failed: %s\n\n", r.Gateway)
		none := true
		for _, result := range r.Results {
			if result.Verdict == Fail {
				none = false
				fmt.Fprintf(&b, "- `%s` (%s): expected %s; saw %s\n", result.ID, result.Severity, result.Want,
					result.Saw)
			}
		}
		if none {
			b.WriteString("Nothing.\n")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func mark(v Verdict) string {
	if v == Fail {
		return "**fail**"
	}
	return string(v)
}

func (r *Report) find(id string) Result {
	for _, result := range r.Results {
		if result.ID == id {
			return result
		}
	}
	return Result{Verdict: "–"}
}
