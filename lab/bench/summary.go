// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
)

// noisy is the share of the measured CPU from which the report calls other processes a disturbance.
const noisy = 0.05

// writeSummary says in sentences what the figures show. It knows nothing but the figures.
func (r *report) writeSummary(m *strings.Builder) {
	m.WriteString("\n## What this shows\n\n")
	for _, line := range slices.Concat(r.aims(), r.costsInWords(), r.timesInWords(), r.memoryInWords(),
		r.responsesInWords(), r.noiseInWords()) {
		m.WriteString("- " + line + "\n")
	}
}

func (r *report) aims() []string {
	var missed []string
	all := r.findings()
	for _, f := range all {
		if f.value > f.target {
			by := fmt.Sprintf("%.3g times the target", f.value/f.target)
			if strings.HasPrefix(by, "1 ") { // what rounds to the target is a miss all the same
				by = "less than 1 % above the target"
			}
			missed = append(missed, fmt.Sprintf("%s (%s)", f.name, by))
		}
	}
	if len(all) == 0 {
		return nil
	}
	line := fmt.Sprintf("The gateway meets %d of %d targets.", len(all)-len(missed), len(all))
	if len(missed) > 0 {
		line += " Missed: " + strings.Join(missed, "; ") + "."
	}
	return []string{line}
}

// costsInWords has one line for requests and one for streams: the range of each program's ratios over the loads.
func (r *report) costsInWords() []string {
	var lines []string
	for _, kind := range []struct {
		name   string
		stream bool
	}{{"request", false}, {"streamed chunk", true}} {
		var base string
		var order []string
		ratios := make(map[string][]float64)
		note := func(name string, list []float64) {
			if len(list) == 0 {
				return
			}
			if ratios[name] == nil {
				order = append(order, name)
			}
			ratios[name] = append(ratios[name], median(list))
		}
		for _, c := range r.compared {
			if c.scenario.stream != kind.stream {
				continue
			}
			base = c.base.name
			note(c.subject.name, c.ratios)
			for _, p := range c.peers {
				note(p.name, p.ratios)
			}
		}
		var parts []string
		for _, name := range order {
			parts = append(parts, name+" "+rangeOf(ratios[name]))
		}
		if len(parts) > 0 {
			lines = append(lines, fmt.Sprintf("CPU time per %s, in times of %s's, over the loads: %s.", kind.name, base,
				and(parts)))
		}
	}
	return lines
}

func rangeOf(list []float64) string {
	least, most := fmt.Sprintf("%.2f", slices.Min(list)), fmt.Sprintf("%.2f", slices.Max(list))
	if least == most {
		return least
	}
	return least + " to " + most
}

func (r *report) timesInWords() []string {
	var lines []string
	for _, c := range r.compared {
		if c.scenario.clients == 1 {
			lines = append(lines, "With one client, above the p50 of direct legs: "+
				inWords(c, func(s series) string { return c.added(s) + " ms" })+".")
		}
	}
	if r.half == nil {
		return lines
	}
	c := *r.half
	return append(lines, fmt.Sprintf("At half of the gateway's capacity, time to the first token, p50 / p99: %s; "+
		"direct %s ms.", inWords(c, func(s series) string {
		text := spread(s) + " ms"
		if share := c.served(s); share < 0.95 {
			text += fmt.Sprintf(" (serving %.0f %% of the load)", 100*share)
		}
		return text
	}), spread(c.direct)))
}

// inWords says something of each program between clients and engines that was measured.
func inWords(c compared, of func(series) string) string {
	var parts []string
	for _, s := range c.programs()[:1+1+len(c.peers)] {
		if len(s.slices) > 0 {
			parts = append(parts, s.name+" "+of(s))
		}
	}
	return and(parts)
}

func (r *report) memoryInWords() []string {
	var parts []string
	for _, f := range r.footprints {
		if f.why == "" {
			parts = append(parts, fmt.Sprintf("%s %.0f KB", f.name, median(f.perStream)/1024))
		}
	}
	if len(parts) == 0 {
		return nil
	}
	return []string{"An open stream takes: " + and(parts) + "."}
}

// responsesInWords says how many responses of each peer were wrong.
func (r *report) responsesInWords() []string {
	var lines []string
	all := slices.Concat(r.compared, r.endpoints)
	if r.half != nil {
		all = append(all, *r.half)
	}
	for _, name := range r.peerNames() {
		var asked, failed int64
		for _, c := range all {
			for _, p := range c.peers {
				if p.name == name {
					asked += p.asked
					failed += p.failed
				}
			}
		}
		switch {
		case asked == 0:
			lines = append(lines, name+" served nothing.")
		case failed == 0:
			lines = append(lines, fmt.Sprintf("%s: all of %s responses were right.", name, count(asked)))
		default:
			lines = append(lines, fmt.Sprintf("%s: %s of %s responses were wrong or missing.", name, count(failed),
				count(asked)))
		}
	}
	return lines
}

func (r *report) noiseInWords() []string {
	worst, where := 0.0, ""
	for _, c := range slices.Concat(r.compared, r.endpoints) {
		others, steal := disturbed(c)
		if others+steal > worst {
			worst, where = others+steal, c.scenario.name
		}
	}
	switch {
	case len(r.compared)+len(r.endpoints) == 0:
		return nil
	case worst <= noisy:
		return []string{fmt.Sprintf("The machine was quiet: others used at most %.1f %% of the measured CPU.",
			100*worst)}
	}
	return []string{fmt.Sprintf("The machine was not quiet: others used up to %.0f %% of the measured CPU (%s). "+
		"Ratios suffer less from that than the figures beside them.", 100*worst, where)}
}

// and joins a list as a sentence does.
func and(list []string) string {
	if len(list) < 2 {
		return strings.Join(list, "")
	}
	return strings.Join(list[:len(list)-1], ", ") + " and " + list[len(list)-1]
}
