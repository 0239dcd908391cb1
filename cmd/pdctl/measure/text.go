// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Row is a line of the table: a value for each target, and their ratio.
type Row struct {
	Name   string
	Values []string
	Ratio  string
}

// Heads are the columns' names.
func (r *Report) Heads() []string {
	if len(r.Targets) < 2 {
		return []string{""}
	}
	return []string{"A", "B", "B/A (least–most)"}
}

// Rows are the table of the report.
func (r *Report) Rows() (rows []Row) {
	counts := func(name string, of func(*Summary) int) {
		line := Row{Name: name}
		for i := range r.Targets {
			line.Values = append(line.Values, strconv.Itoa(of(&r.Targets[i])))
		}
		rows = append(rows, line)
	}
	counts("served", func(t *Summary) int { return t.Served })
	counts("failed", func(t *Summary) int { return t.Failed })
	for _, n := range numbers(r.slo) {
		line := Row{Name: n.name}
		for i := range r.Targets {
			line.Values = append(line.Values, digits(n.of(&r.Targets[i])))
		}
		for _, ratio := range r.Ratios {
			if ratio.Name == n.name {
				line.Ratio = fmt.Sprintf("%.2f (%.2f–%.2f)", ratio.Median, ratio.Least, ratio.Most)
			}
		}
		rows = append(rows, line)
	}
	return rows
}

// digits writes three digits or more.
func digits(v float64) string {
	switch {
	case v < 10:
		return fmt.Sprintf("%.2f", v)
	case v < 100:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// Notes are the sentences below the table.
func (r *Report) Notes() []string { return slices.Concat(r.objectives(), r.tokens(), r.counts()) }

// objectives says what goodput means.
func (r *Report) objectives() []string {
	if r.SLO == nil {
		return nil
	}
	var terms []string
	for _, o := range []struct {
		name string
		most float64
	}{{"TTFT", r.SLO.TTFT}, {"TPOT", r.SLO.TPOT}, {"E2E", r.SLO.E2E}} {
		if o.most > 0 {
			terms = append(terms, fmt.Sprintf("%s ≤ %.4g ms", o.name, o.most))
		}
	}
	return []string{"goodput: " + strings.Join(terms, ", ")}
}

// tokens says how long prompts and responses were.
func (r *Report) tokens() (notes []string) {
	for i, t := range r.Targets {
		source := "the servers' usage"
		switch {
		case t.FromUsage == 0:
			source = "events with content"
		case t.FromEvents > 0:
			source = "usage where the server told it, else events with content"
		}
		in := fmt.Sprintf("%.4g in", t.PromptTokens)
		if r.asked > 0 {
			in += fmt.Sprintf(" (%d asked)", r.asked)
		}
		notes = append(notes, fmt.Sprintf("%stokens: %s, %.4g out on average, counted by %s", r.name(i), in, t.Tokens,
			source))
	}
	return notes
}

// counts says how requests were served, and how they failed.
func (r *Report) counts() (notes []string) {
	for i, t := range r.Targets {
		if len(t.Modes) > 0 {
			notes = append(notes, fmt.Sprintf("%sserved as: %s", r.name(i), shares(t.Modes, t.Served)))
		}
		if len(t.Errors) > 0 {
			notes = append(notes, fmt.Sprintf("%serrors: %s", r.name(i), counted(t.Errors)))
		}
	}
	return notes
}

func (r *Report) name(i int) string {
	if len(r.Targets) < 2 {
		return ""
	}
	return string(rune('A'+i)) + " "
}

func shares(counts map[string]int, of int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s %.4g %%", name, 100*float64(counts[name])/float64(of)))
	}
	return strings.Join(parts, ", ")
}

func counted(counts map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s: %d", name, counts[name]))
	}
	return strings.Join(parts, ", ")
}

// Heading tells what was measured.
func (r *Report) Heading() (lines []string) {
	for i, t := range r.Targets {
		lines = append(lines, fmt.Sprintf("%s%s  %s", r.name(i), t.URL, t.Model))
	}
	return append(lines, fmt.Sprintf("%s; seed %d; %s UTC", r.Load, r.Seed, r.Date))
}

// Text writes the report for people.
func (r *Report) Text(w io.Writer) error {
	var b strings.Builder
	for _, line := range r.Heading() {
		fmt.Fprintln(&b, line)
	}
	fmt.Fprintln(&b)
	rows := r.Rows()
	if len(r.Targets) > 1 {
		rows = slices.Insert(rows, 0, Row{Values: r.Heads()[:2], Ratio: r.Heads()[2]})
	}
	var sizes [3]int // of the names, the values and the ratios
	for _, line := range rows {
		sizes[0], sizes[2] = max(sizes[0], len(line.Name)), max(sizes[2], utf8.RuneCountInString(line.Ratio))
		for _, value := range line.Values {
			sizes[1] = max(sizes[1], len(value))
		}
	}
	for _, line := range rows {
		fmt.Fprintf(&b, "%-*s", sizes[0], line.Name)
		for _, value := range line.Values {
			fmt.Fprintf(&b, "   %*s", sizes[1], value)
		}
		if line.Ratio != "" {
			fmt.Fprintf(&b, "   %*s", sizes[2], line.Ratio)
		}
		fmt.Fprintln(&b)
	}
	fmt.Fprintln(&b)
	writeNotes(&b, r.Notes(), r.Warnings)
	_, err := io.WriteString(w, b.String())
	return err
}

func writeNotes(b *strings.Builder, notes, warnings []string) {
	for _, note := range notes {
		fmt.Fprintln(b, note)
	}
	for _, warning := range warnings {
		fmt.Fprintln(b, "warning:", warning)
	}
}
