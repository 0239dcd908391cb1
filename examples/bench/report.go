// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// report is everything that was measured.
type report struct {
	title       string
	machine     machine
	pace        pace
	took        time.Duration
	calibration bool
	picture     string // the plot's file; "": there is none

	starts     []starts
	footprints []footprint
	compared   []compared
	endpoints  []compared
	spin       *compared

	prefills, decodes int64
	faults            []string
	faultCount        int
}

// finding is one figure beside its target.
type finding struct {
	name   string
	value  float64
	target float64
}

// findings lists the figures that have targets.
func (r *report) findings() []finding {
	var list []finding
	for _, c := range r.compared {
		list = append(list, finding{c.scenario.name, median(c.ratios), c.scenario.target})
	}
	for _, c := range r.endpoints {
		list = append(list, finding{c.scenario.name, median(c.ratios), targetEndpoints})
	}
	if len(r.footprints) > 0 {
		list = append(list, finding{"memory per open stream", median(r.footprints[0].perStream), targetStreamBytes})
	}
	if len(r.starts) > 0 {
		list = append(list, finding{"start to first response", float64(middleOf(r.starts[0])), float64(targetStart)})
	}
	return list
}

// verdict returns an error if a response was wrong and, in a short run, whose figures nobody reads, if a figure is far
// beyond its target.
func (r *report) verdict(p pace) error {
	var errs []error
	if r.faultCount > 0 {
		errs = append(errs, fmt.Errorf("%d faults, the first:\n  %s", r.faultCount, strings.Join(r.faults, "\n  ")))
	}
	if r.calibration {
		return errors.Join(append(errs, r.calibrated(p))...)
	}
	for _, f := range r.findings() {
		if p.quick && f.value > 2*f.target {
			errs = append(errs, fmt.Errorf("%s: %.4g is more than twice the target %.4g", f.name, f.value, f.target))
		}
	}
	return errors.Join(errs...)
}

// calibrated returns an error if the benchmark has measured known costs wrongly.
func (r *report) calibrated(p pace) error {
	width := 0.03
	if p.quick {
		width = 0.15 // half-second slices, taken once
	}
	var errs []error
	for _, c := range r.compared {
		if m := median(c.ratios); m < 1-width || m > 1+width {
			errs = append(errs, fmt.Errorf("%s: two equal programs differ by the ratio %.3f", c.scenario.name, m))
		}
	}
	if r.spin != nil {
		if seen := r.spinSeen(); seen < 0.7 || seen > 1.3 {
			errs = append(errs, fmt.Errorf("the variant of minimal burns %v more for each request, and the benchmark "+
				"measured %.0f %% of it", calibration, 100*seen))
		}
	}
	return errors.Join(errs...)
}

// spinSeen returns the measured slowdown as a share of the known one, from neighbouring slices.
func (r *report) spinSeen() float64 {
	var more []float64
	base := costs(r.spin.base)
	for i, cost := range costs(r.spin.subject) {
		more = append(more, cost-base[i])
	}
	return median(more) / (float64(calibration) / 1e3)
}

func middleOf(s starts) time.Duration {
	return percentile(slices.Sorted(slices.Values(s.times)), 50)
}

// write prints the report as Markdown.
func (r *report) write(w io.Writer) error {
	var m strings.Builder
	fmt.Fprintf(&m, "# %s\n\n%s, %d cores; %s; %s; %s.\n", r.title, r.machine.model, r.machine.cores,
		r.machine.kernel, r.machine.golang, r.machine.date)
	fmt.Fprintf(&m, "Each program alone on one CPU with GOMAXPROCS=1, clients and engines on another; %d × A B B A "+
		"slices of %v;\n"+
		"CPU time from the kernel's clock of the process; paced and slow streams take three times as many slices. "+
		"Took %v.\n",
		r.pace.rounds, r.pace.slice, r.took.Round(time.Second))
	r.writeRatios(&m)
	r.writeLatencies(&m)
	r.writeFootprints(&m)
	if r.spin != nil {
		fmt.Fprintf(&m, "\nA variant of minimal that burns %v more for each request was measured %.1f µs dearer "+
			"(%.0f %%).\n", calibration, r.spinSeen()*float64(calibration)/1e3, 100*r.spinSeen())
	}
	fmt.Fprintf(&m, "\nChecked: %d prefill legs, %d decode legs, every response byte for byte; faults: %d.\n",
		r.prefills, r.decodes, r.faultCount)
	_, err := io.WriteString(w, m.String())
	return err
}

func (r *report) writeRatios(m *strings.Builder) {
	all := slices.Concat(r.compared, r.endpoints)
	if len(all) == 0 {
		return
	}
	subject, base := all[0].subject.name, all[0].base.name
	fmt.Fprintf(m, "\n## CPU time\n\nMicroseconds per request, or per chunk where the load is SSE; the ratio is the "+
		"median of slices that lay "+
		"next to each other, and in brackets their quartiles, the least and the greatest.\n\n")
	fmt.Fprintf(m, "| load | %s | %s | ratio | target | | CPU busy | others on that CPU |\n"+
		"|---|---|---|---|---|---|---|---|\n", subject, base)
	for _, c := range all {
		got, ratios := median(c.ratios), slices.Sorted(slices.Values(c.ratios))
		fmt.Fprintf(m, "| %s | %.2f | %.2f | **%.3f** (%.3f to %.3f, %.3f to %.3f) | %.2f | %s | %.0f %%, %.0f %% | "+
			"%s |\n",
			c.scenario.name, median(costs(c.subject)), median(costs(c.base)), got,
			percentile(ratios, 25), percentile(ratios, 75), slices.Min(ratios), slices.Max(ratios),
			c.scenario.target, mark(got <= c.scenario.target), 100*busy(c.subject), 100*busy(c.base), noise(c))
	}
	if r.picture != "" {
		fmt.Fprintf(m, "\n![The ratios of all loads, with their quartiles](%s)\n", r.picture)
	}
}

// noise says how much of the CPU other processes used while the slices ran.
func noise(c compared) string {
	var others, steal, wall time.Duration
	for _, slice := range slices.Concat(c.subject.slices, c.base.slices) {
		others += slice.others
		steal += slice.steal
		wall += slice.wall
	}
	return fmt.Sprintf("%.1f %%, stolen %.1f %%", 100*float64(others)/float64(wall), 100*float64(steal)/float64(wall))
}

func (r *report) writeLatencies(m *strings.Builder) {
	if len(r.compared) == 0 {
		return
	}
	c := r.compared[0]
	fmt.Fprintf(m, "\n## Latency and rate\n\nMilliseconds, p50 / p99, under the same full load: of a whole response; "+
		"of a coalesced stream's first chunk; of a paced "+
		"chunk from the engine's write to the client's read. Direct: the clients do both legs themselves.\n\n")
	fmt.Fprintf(m, "| load | %s | %s | direct | %s /s | %s /s | direct /s |\n|---|---|---|---|---|---|---|\n",
		c.subject.name, c.base.name, c.subject.name, c.base.name)
	for _, c := range r.compared {
		fmt.Fprintf(m, "| %s | %s | %s | %s | %.0f | %.0f | %.0f |\n", c.scenario.name,
			spread(c.subject), spread(c.base), spread(c.direct), rate(c.subject), rate(c.base), rate(c.direct))
	}
}

func spread(s series) string {
	sorted := latencies(s)
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	return fmt.Sprintf("%.2f / %.2f", ms(percentile(sorted, 50)), ms(percentile(sorted, 99)))
}

func (r *report) writeFootprints(m *strings.Builder) {
	if len(r.footprints) == 0 {
		return
	}
	subject, base := r.footprints[0], r.footprints[1]
	fmt.Fprintf(m, "\n## Memory and start\n\n| | %s | %s | target | |\n|---|---|---|---|---|\n", subject.name,
		base.name)
	fmt.Fprintf(m, "| memory per open stream at %d streams, KB: resident, GOGC=100, uncollected garbage included; "+
		"median of %d (least to greatest) | %s | %s | %d | %s |\n",
		streamsOpen, len(subject.perStream), kilobytes(subject.perStream), kilobytes(base.perStream),
		targetStreamBytes>>10,
		mark(median(subject.perStream) <= targetStreamBytes))
	fmt.Fprintf(m, "| memory at rest, KB, GOGC=100 | %s | %s | | |\n",
		kilobytes(subject.atRest), kilobytes(base.atRest))
	fmt.Fprintf(m, "| exec to first response, ms, median of %d (greatest) | %s | %s | %d | %s |\n",
		len(r.starts[0].times),
		startText(r.starts[0]), startText(r.starts[1]), targetStart.Milliseconds(),
		mark(middleOf(r.starts[0]) <= targetStart))
}

func kilobytes(list []float64) string {
	return fmt.Sprintf("%.1f (%.1f to %.1f)", median(list)/1024, slices.Min(list)/1024, slices.Max(list)/1024)
}

func startText(s starts) string {
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	return fmt.Sprintf("%.1f (%.1f)", ms(middleOf(s)), ms(slices.Max(s.times)))
}

func mark(met bool) string {
	if met {
		return "met"
	}
	return "**missed**"
}
