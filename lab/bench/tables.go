// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

// write prints the report as Markdown.
func (r *report) write(w io.Writer) error {
	var m strings.Builder
	fmt.Fprintf(&m, "# %s\n\n%s, %d cores; %s; %s; %s.", r.title, r.machine.model, r.machine.cores,
		r.machine.kernel, r.machine.golang, r.machine.date)
	if len(r.peers) > 0 {
		fmt.Fprintf(&m, " Peers: %s.", and(r.peerNames()))
	}
	fmt.Fprintf(&m, "\n\nEach program runs on one CPU, with GOMAXPROCS=1 if it is in Go; clients and engines run on "+
		"another. %d times there and back through all programs, in slices of %v; "+
		"paced and slow streams take three times as many. Took %v.\n",
		r.pace.rounds, r.pace.slice, r.took.Round(time.Second))
	r.writeRatios(&m)
	r.writeHalfLoad(&m)
	r.writeLatencies(&m)
	r.writeFootprints(&m)
	if r.spin != nil {
		fmt.Fprintf(&m, "\nA variant of minimal that burns %v more for each request was measured %.1f µs dearer "+
			"(%.0f %%).\n", calibration, r.spinSeen()*float64(calibration)/1e3, 100*r.spinSeen())
	}
	if !r.calibration {
		r.writeSummary(&m)
	}
	whose := ""
	if len(r.peers) > 0 {
		whose = ", peers aside"
	}
	fmt.Fprintf(&m, "\nChecked%s: %d prefill legs, %d decode legs, every response byte for byte; faults: %d.\n",
		whose, r.prefills, r.decodes, r.faultCount)
	_, err := io.WriteString(w, m.String())
	return err
}

func (r *report) peerNames() []string {
	var list []string
	for _, p := range r.peers {
		list = append(list, p.title())
	}
	return list
}

// head writes a table's head.
func head(m *strings.Builder, cells ...string) {
	fmt.Fprintf(m, "| %s |\n|%s\n", strings.Join(cells, " | "), strings.Repeat("---|", len(cells)))
}

func (r *report) writeRatios(m *strings.Builder) {
	all := slices.Concat(r.compared, r.endpoints)
	if len(all) == 0 {
		return
	}
	subject, base := all[0].subject.name, all[0].base.name
	fmt.Fprintf(m, "\n## CPU time\n\n%s and %s: microseconds per request, or per chunk where the load is SSE. "+
		"Ratio: to %s, the median over neighbouring slices, and in brackets the quartiles",
		subject, base, base)
	if len(r.peers) > 0 {
		m.WriteString("; the columns of peers have their ratios to " + base)
	}
	m.WriteString(". With many endpoints, each gateway is compared with itself at two (2 KB, 16 clients).\n\n")
	head(m, slices.Concat([]string{"load", subject, base, "ratio", "target", ""}, r.peerNames(),
		[]string{"CPU busy", "others on that CPU"})...)
	for _, c := range all {
		got := median(c.ratios)
		fmt.Fprintf(m, "| %s | %.2f | %.2f | %s | %.2f | %s |", c.scenario.name, median(costs(c.subject)),
			median(costs(c.base)), quartiles(c.ratios), c.scenario.target, mark(got <= c.scenario.target))
		for _, p := range c.peers {
			fmt.Fprintf(m, " %s |", p.cell())
		}
		fmt.Fprintf(m, " %.0f %%, %.0f %% | %s |\n", 100*busy(c.subject), 100*busy(c.base), noise(c))
	}
	for _, p := range r.pictures {
		fmt.Fprintf(m, "\n![%s](%s)\n", p.title, p.file)
	}
}

func quartiles(ratios []float64) string {
	sorted := slices.Sorted(slices.Values(ratios))
	return fmt.Sprintf("**%.3f** (%.3f to %.3f)", median(ratios), percentile(sorted, 25), percentile(sorted, 75))
}

// cell is what the table says of a peer: its ratio, the wrong responses, and why it was not measured to the end.
func (p rival) cell() string {
	var parts []string
	if len(p.ratios) > 0 {
		parts = append(parts, quartiles(p.ratios))
	}
	if p.failed > 0 {
		parts = append(parts, fmt.Sprintf("wrong: %s of %s (%s)", count(p.failed), count(p.asked), plain(p.reason)))
	}
	if p.why != "" {
		parts = append(parts, "– "+plain(p.why))
	}
	return strings.Join(parts, "; ")
}

// plain makes a fault fit into a cell.
func plain(text string) string {
	text = strings.NewReplacer("|", "/", "\n", " ").Replace(text)
	if runes := []rune(text); len(runes) > 120 {
		text = string(runes[:120]) + "…"
	}
	return text
}

// count writes a number with commas between thousands.
func count(n int64) string {
	text := strconv.FormatInt(n, 10)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// noise says how much of the CPU other processes used while the slices ran.
func noise(c compared) string {
	others, steal := disturbed(c)
	return fmt.Sprintf("%.1f %%, stolen %.1f %%", 100*others, 100*steal)
}

// disturbed returns the shares of the CPU that other processes and other guests used while the slices ran.
func disturbed(c compared) (others, steal float64) {
	var o, s, wall time.Duration
	for _, slice := range slices.Concat(c.subject.slices, c.base.slices) {
		o += slice.others
		s += slice.steal
		wall += slice.wall
	}
	return float64(o) / float64(max(wall, 1)), float64(s) / float64(max(wall, 1))
}

// programs lists what was measured in a scenario, in the order of the columns.
func (c compared) programs() []series {
	list := []series{c.subject, c.base}
	for _, p := range c.peers {
		list = append(list, p.series)
	}
	return append(list, c.direct)
}

func names(list []series) []string {
	var all []string
	for _, s := range list {
		all = append(all, s.name)
	}
	return all
}

// each applies a function to the series that have slices. The others have "–".
func each(list []series, of func(series) string) string {
	var cells []string
	for _, s := range list {
		if len(s.slices) == 0 {
			cells = append(cells, "–")
		} else {
			cells = append(cells, of(s))
		}
	}
	return strings.Join(cells, " | ")
}

func (r *report) writeHalfLoad(m *strings.Builder) {
	if r.half == nil {
		return
	}
	c := *r.half
	fmt.Fprintf(m, "\n## Time to the first token at half load\n\nHalf of what the %s can serve: %s streams per second "+
		"with prompts of 2 KB. Milliseconds. A program that cannot serve that many has a part of them only, and its "+
		"times are those of full load.\n\n", c.subject.name, count(int64(c.scenario.rate)))
	head(m, append([]string{""}, names(c.programs())...)...)
	fmt.Fprintf(m, "| p50 / p99 | %s |\n", each(c.programs(), spread))
	fmt.Fprintf(m, "| p50 above direct | %s |\n", each(c.programs(), c.added))
	fmt.Fprintf(m, "| served of that rate | %s |\n", each(c.programs(), func(s series) string {
		return fmt.Sprintf("%.0f %%", 100*c.served(s))
	}))
	for _, p := range c.peers {
		if p.failed > 0 || p.why != "" {
			p.ratios = nil // of no interest here
			fmt.Fprintf(m, "\n%s: %s.\n", p.name, p.cell())
		}
	}
}

// served is the share of the planned requests that a program has served.
func (c compared) served(s series) float64 {
	return rate(s) / float64(max(c.scenario.chunks, 1)) / c.scenario.rate
}

// added is what a program adds to the median of the direct legs.
func (c compared) added(s series) string {
	return fmt.Sprintf("%.2f", inMS(percentile(latencies(s), 50))-inMS(percentile(latencies(c.direct), 50)))
}

func (r *report) writeLatencies(m *strings.Builder) {
	if len(r.compared) == 0 {
		return
	}
	columns := append([]string{"load"}, names(r.compared[0].programs())...)
	m.WriteString("\n## Latency at full load\n\nMilliseconds, p50 / p99: of a whole response; of a coalesced " +
		"stream's first chunk; of a paced chunk from the engine's write to the client's read. Direct: the clients " +
		"do both legs themselves.\n\n")
	head(m, columns...)
	for _, c := range r.compared {
		fmt.Fprintf(m, "| %s | %s |\n", c.scenario.name, each(c.programs(), spread))
		if c.scenario.clients == 1 {
			fmt.Fprintf(m, "| %s: p50 above direct | %s |\n", c.scenario.name, each(c.programs(), c.added))
		}
	}
	m.WriteString("\n## Rate\n\nRequests per second, or chunks per second where the load is SSE. Paced streams " +
		"have the rate that the engines give them.\n\n")
	head(m, columns...)
	for _, c := range r.compared {
		fmt.Fprintf(m, "| %s | %s |\n", c.scenario.name, each(c.programs(), func(s series) string {
			return count(int64(rate(s)))
		}))
	}
}

func inMS(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func spread(s series) string {
	sorted := latencies(s)
	if len(sorted) == 0 {
		return "–" // all first chunks came before the measured time
	}
	return fmt.Sprintf("%.2f / %.2f", inMS(percentile(sorted, 50)), inMS(percentile(sorted, 99)))
}

func (r *report) writeFootprints(m *strings.Builder) {
	if len(r.footprints) == 0 {
		return
	}
	columns := []string{""}
	for _, f := range r.footprints {
		columns = append(columns, f.name)
	}
	subject := r.footprints[0]
	m.WriteString("\n## Memory and start\n\nResident memory, uncollected garbage included, with GOGC=100 if the " +
		"program is in Go.\n\n")
	head(m, append(columns, "target", "")...)
	fmt.Fprintf(m, "| KB per open stream at %s streams: median of %d (least to greatest) | %s | %d | %s |\n",
		count(streamsOpen), len(subject.perStream),
		r.footprintCells(func(f footprint) string { return kilobytes(f, f.perStream) }),
		targetStreamBytes>>10, mark(median(subject.perStream) <= targetStreamBytes))
	fmt.Fprintf(m, "| KB at rest | %s | | |\n",
		r.footprintCells(func(f footprint) string { return kilobytes(f, f.atRest) }))
	fmt.Fprintf(m, "| exec to first response, ms: median (greatest; times) | %s | %d | %s |\n",
		r.footprintCells(startText), targetStart.Milliseconds(), mark(middleOf(subject.started) <= targetStart))
}

func (r *report) footprintCells(of func(footprint) string) string {
	var cells []string
	for _, f := range r.footprints {
		cells = append(cells, of(f))
	}
	return strings.Join(cells, " | ")
}

func kilobytes(f footprint, list []float64) string {
	if f.why != "" {
		return "– " + plain(f.why)
	}
	return fmt.Sprintf("%.1f (%.1f to %.1f)", median(list)/1024, slices.Min(list)/1024, slices.Max(list)/1024)
}

func startText(f footprint) string {
	if len(f.started) == 0 {
		return "–"
	}
	return fmt.Sprintf("%.1f (%.1f; %d)", inMS(middleOf(f.started)), inMS(slices.Max(f.started)), len(f.started))
}

func mark(met bool) string {
	if met {
		return "met"
	}
	return "**missed**"
}
