// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// pairsMost is how many pairs of a model are shown, at most.
const pairsMost = 6

// model draws a model: what it does, its engines, some of its pairs, and what has failed.
func (v *view) model(m *modelRow, rate string, pairs int) []string {
	state, colour := "ready", good
	if !m.Ready {
		state, colour = cmp.Or(m.Reason, "not ready"), bad
	}
	sum := 0.0
	for _, n := range m.Phases {
		sum += n
	}
	head := fmt.Sprintf("%s  %s  %s", v.paint(plain(cmp.Or(m.Model, "any model"), 32), bold),
		v.paint(plain(m.Connector, 16), soft), v.paint(plain(state, 60), colour))
	lines := v.pack(head, []string{fmt.Sprintf("in flight %.0f", sum), "served " + rate,
		"tokens taken over " + m.taken()})
	if m.Admission != nil {
		lines = append(lines, v.pack("", m.Admission.facts())...)
	}
	lines = append(lines, v.engines(m.Endpoints)...)
	lines = append(lines, v.pairs(m.Pairs, pairs)...)
	var failed []string
	for _, code := range slices.Sorted(maps.Keys(m.Totals.Errors)) {
		failed = append(failed, fmt.Sprintf("%s %.0f", code, m.Totals.Errors[code]))
	}
	if len(failed) > 0 {
		lines = append(lines, v.paint(plain("  failed attempts so far: "+strings.Join(failed, ", "), 200), soft))
	}
	return lines
}

// pack writes facts after a head, on as many lines as they need: one is not cut as long as it fits on a line.
func (v *view) pack(head string, facts []string) []string {
	lines := []string{head}
	for _, fact := range facts {
		line := &lines[len(lines)-1]
		switch {
		case *line == "":
			*line = "  " + fact
		case visible(*line)+3+width(fact) <= v.width:
			*line += "   " + fact
		default:
			lines = append(lines, "  "+fact)
		}
	}
	return lines
}

// taken is how many tokens decode engines took over, as responses or else engines count them. Where nobody does, it is
// not 0.
func (m *modelRow) taken() string {
	n := m.Totals.Reused
	if n == 0 && m.KV != nil {
		n = m.KV.Taken
	}
	if n == 0 {
		return "–"
	}
	return count(n)
}

func (a *admissionRow) facts() []string {
	place := func(name string, o occupancy) string {
		if o.Limit == 0 {
			return name + " " + count(o.InFlight)
		}
		return name + " " + count(o.InFlight) + " of " + count(o.Limit)
	}
	sum := 0.0
	var reasons []string
	for _, reason := range slices.Sorted(maps.Keys(a.Refused)) {
		if n := a.Refused[reason]; n > 0 {
			sum += n
			reasons = append(reasons, plain(strings.ReplaceAll(reason, "_", " "), 16)+" "+count(n))
		}
	}
	refused := "refused " + count(sum)
	if sum > 0 {
		refused += " (" + strings.Join(reasons, ", ") + ")"
	}
	return []string{"queue " + count(a.Queued), place("prefill", a.Prefill), place("decode", a.Decode), refused}
}

// stands is an engine's state in a word, and that word's colour: the worst of what is wrong with it, as in the live
// view.
func (e *engineRow) stands() (word, colour string) {
	switch marks := e.Recent.Marks; {
	case e.State == "quarantine":
		return e.State, bad
	case !e.Healthy:
		return "ill", bad
	case len(marks) > 0:
		return marks[0].Word, stateColour(marks[0].Word)
	case e.State != "":
		return e.State, stateColour(e.State)
	case e.Phase == "ready":
		return e.Phase, good
	case e.Phase == "draining":
		return e.Phase, attention
	}
	return strings.ReplaceAll(e.Phase, "_", " "), bad
}

// rank orders engines: those that are not well stand before the others.
func (e *engineRow) rank() int {
	switch _, colour := e.stands(); colour {
	case bad:
		return 0
	case attention:
		return 1
	}
	return 2
}

// stateColour is that of a cooldown, which ends by itself, of a mark, or of a quarantine.
func stateColour(state string) string {
	switch state {
	case "":
		return ""
	case "cooldown", "slow", "overloaded":
		return attention
	}
	return bad
}

func (v *view) engines(endpoints []engineRow) []string {
	order := []string{"encode", "prefill", "both", "decode"}
	list := slices.Clone(endpoints)
	slices.SortStableFunc(list, func(x, y engineRow) int {
		return cmp.Or(cmp.Compare(x.rank(), y.rank()), cmp.Compare(slices.Index(order, x.Role),
			slices.Index(order, y.Role)), cmp.Compare(x.ID, y.ID))
	})
	var ids, roles, states, colours, loads, runs, waits, used []string
	for i := range list {
		e := &list[i]
		word, colour := e.stands()
		ids, roles = append(ids, e.ID), append(roles, e.Role)
		states, colours = append(states, word), append(colours, colour)
		loads = append(loads, strconv.Itoa(e.Load))
		if e.Engine == nil {
			runs, waits, used = append(runs, "–"), append(waits, "–"), append(used, "–")
			continue
		}
		runs, waits = append(runs, strconv.Itoa(e.Engine.Running)), append(waits, strconv.Itoa(e.Engine.Waiting))
		used = append(used, fmt.Sprintf("%.0f %%", 100*e.Engine.KVUsage))
	}
	state := texts("state", 11, states)
	state.colours = colours
	columns := v.fit([]column{texts("engine", 36, slices.Clone(ids)), texts("role", 7, roles), state,
		figures("requests", 8, loads), figures("runs", 5, runs), figures("waits", 5, waits), figures("KV", 5, used)},
		18, []string{"runs", "waits", "KV", "role", "requests"})
	columns[0].cells = ids
	for i := range ids {
		ids[i] = middle(ids[i], columns[0].size)
	}
	return v.table(columns)
}

// pairs is a table of the pairs in a cooldown or in quarantine, and of the busiest ones of the others. It has the order
// of their names, in which a pair stays where it is while the numbers change.
func (v *view) pairs(all []pairRow, most int) []string {
	if len(all) == 0 || most <= 0 {
		return nil
	}
	ranks := map[string]int{"": 2, "cooldown": 1}
	list := slices.Clone(all)
	slices.SortStableFunc(list, func(x, y pairRow) int {
		return cmp.Or(cmp.Compare(ranks[x.State], ranks[y.State]), cmp.Compare(y.Served+y.Failed, x.Served+x.Failed))
	})
	list = list[:min(len(list), most)]
	slices.SortStableFunc(list, func(x, y pairRow) int {
		return cmp.Or(cmp.Compare(x.Prefill, y.Prefill), cmp.Compare(x.Decode, y.Decode))
	})
	head := "pair"
	if len(list) < len(all) {
		head = "busiest pairs"
	}
	known := func(ms *float64) string {
		if ms == nil {
			return "–"
		}
		return mean(*ms)
	}
	prefill, decode := 1, 1
	var served, failed, failures, handoff, first, states, colours []string
	for i := range list {
		p := &list[i]
		prefill, decode = max(prefill, width(p.Prefill)), max(decode, width(p.Decode))
		served, failed = append(served, count(p.Served)), append(failed, count(p.Failed))
		colour := ""
		if p.Failed > 0 {
			colour = bad
		}
		failures = append(failures, colour)
		handoff, first = append(handoff, known(p.Handoff)), append(first, known(p.Transfer))
		states, colours = append(states, cmp.Or(p.State, "–")), append(colours, stateColour(p.State))
	}
	state, fail := texts("state", 10, states), figures("failed", 6, failed)
	state.colours, fail.colours = colours, failures
	columns := v.fit([]column{{head: head, size: max(min(prefill+decode+3, 60), width(head))},
		figures("served", 6, served), fail, figures("handoff", 7, handoff), figures("first token", 8, first), state},
		23, []string{"handoff", "first token", "failed", "served"})
	room := max(columns[0].size-3, 2) // " → "
	prefill = min(prefill, max(room/2, room-decode))
	for i := range list {
		columns[0].cells = append(columns[0].cells, pad(middle(list[i].Prefill, prefill), prefill, false)+" → "+
			middle(list[i].Decode, room-prefill))
	}
	return v.table(columns)
}

// mean is a time that may be far below a millisecond.
func mean(ms float64) string {
	switch {
	case ms < .0995:
		return fmt.Sprintf("%.0f µs", 1000*max(ms, 0))
	case ms < 9.95:
		return fmt.Sprintf("%.1f ms", ms)
	}
	return took(ms)
}
