// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// view draws pictures of a gateway for one size of a terminal. No line is longer than the terminal is wide: a line
// that wraps would destroy the columns.
type view struct {
	width   int
	height  int // 0: no limit
	rows    int // of ended attempts, at most
	colours bool
}

// inFlight is how many attempts in flight are shown. A live view keeps the place for all of them, so that what is
// below does not jump each second.
func (v *view) inFlight() int {
	if v.height == 0 {
		return 5
	}
	return min(max(v.height/8, 2), 5)
}

// room is how many lines are left for pairs and ended attempts, of a terminal in which others take so many.
func (v *view) room(others int) int {
	const headings, more = 3, 1 // two headings and the line between them; "and … more"
	return max(v.height-others-headings-v.inFlight()-more, 0)
}

// Colours of a terminal's palette, which the user has chosen to be readable.
const (
	bold, soft, good, bad = "1", "90", "32", "31"
	attention             = "33"
)

// draw returns the lines of a picture. err is why there is no newer one.
func (v *view) draw(now, before *picture, err error) []string {
	state := v.paint("ready", good)
	switch {
	case now.Draining:
		state = v.paint("draining", attention)
	case slices.ContainsFunc(now.Models, func(m modelRow) bool { return !m.Ready }):
		state = v.paint("not ready", bad)
	}
	lines := []string{v.paint("pdkit gateway", bold) + "  " + state + "  " +
		v.paint(now.Time.UTC().Format(time.TimeOnly)+" UTC", soft)}
	if err != nil {
		lines = append(lines, v.paint(plain("no news: "+err.Error(), 200), bad))
	}
	pairs := v.pairRows(len(lines), now)
	for i := range now.Models {
		lines = append(lines, "")
		lines = append(lines, v.model(&now.Models[i], rate(&now.Models[i], now, before), pairs)...)
	}
	var running, ended []attempt
	for _, r := range now.Requests {
		if r.Running {
			running = append(running, r)
		} else {
			ended = append(ended, r)
		}
	}
	rows := v.rows
	if v.height > 0 {
		rows = min(rows, v.room(len(lines)))
	}
	ended = ended[:min(len(ended), rows)]
	longest := 1.0
	for _, r := range slices.Concat(running[:min(len(running), v.inFlight())], ended) {
		longest = max(longest, r.End)
	}
	lines = append(lines, "", v.paint("in flight", bold)+v.scale(longest))
	shown := v.requests(running, longest, v.inFlight())
	for v.height > 0 && len(shown) < v.inFlight()+1 { // the last line is for "and … more"
		shown = append(shown, "")
	}
	lines = append(lines, shown...)
	if v.height == 0 {
		lines = append(lines, "")
	}
	lines = append(lines, v.paint("ended", bold)+v.legend())
	lines = append(lines, v.requests(ended, longest, rows)...)
	if v.height > 0 && len(lines) > v.height {
		more := len(lines) - v.height + 1
		lines = append(lines[:v.height-1], v.paint(plural(more, "line")+" more than the terminal has", soft))
	}
	for i, line := range lines {
		lines[i] = cut(line, v.width)
	}
	return lines
}

// pairRows is how many pairs of each model are shown: a third of what is left, since the ended attempts tell more, and
// none where that is not worth the line of the table's head.
func (v *view) pairRows(others int, now *picture) int {
	if v.height == 0 || len(now.Models) == 0 {
		return pairsMost
	}
	for i := range now.Models {
		others += 1 + len(v.model(&now.Models[i], "99.9/s", 0))
	}
	rows := v.room(others) / 3 / len(now.Models)
	if rows < 2 {
		return 0
	}
	return min(rows, pairsMost)
}

// escapes begin and end colours.
var escapes = regexp.MustCompile(`\x1b[^m]*m`)

// visible is how many characters of a line one sees.
func visible(line string) int { return width(escapes.ReplaceAllString(line, "")) }

// cut shortens a line to n characters, not counting colours. One that was longer ends with "…".
func cut(line string, n int) string {
	if visible(line) <= n {
		return line
	}
	seen, escape, end := 0, false, 0
	for i, r := range line {
		switch {
		case r == '\x1b':
			escape = true
		case escape:
			escape = r != 'm'
		case seen < n:
			seen, end = seen+1, i // the last of n characters makes room for "…"
		}
	}
	short := line[:end] + "…"
	if strings.Contains(short, "\x1b") {
		short += "\x1b[0m"
	}
	return short
}

// rate is how many requests a second a model has served since the picture before.
func rate(m *modelRow, now, before *picture) string {
	if before == nil {
		return "–"
	}
	for i := range before.Models {
		old := &before.Models[i]
		if seconds := now.Time.Sub(before.Time).Seconds(); old.Model == m.Model && seconds > 0 {
			return fmt.Sprintf("%.1f/s", max(0, m.Totals.Served-old.Totals.Served)/seconds)
		}
	}
	return "–"
}

// What a line of an attempt has beside its timeline: the request's id, what became of it, and how long it took.
const (
	idSize, wordSize, tookSize = 16, 16, 8
	leastBar                   = 10
)

// bars is how long timelines are; 0 where the terminal has no place for them.
func (v *view) bars() int {
	n := v.width - idSize - wordSize - tookSize - 8
	if n < leastBar {
		return 0
	}
	return n
}

func (v *view) requests(list []attempt, longest float64, most int) []string {
	if len(list) == 0 {
		return []string{v.paint("  none", soft)}
	}
	ids := idSize
	if v.bars() == 0 {
		ids = max(min(idSize, v.width-wordSize-tookSize-6), 1)
	}
	var lines []string
	for _, r := range list[:min(len(list), most)] {
		id := plain(r.RequestID, ids)
		if again := fmt.Sprintf(" #%d", r.Attempt); r.Attempt > 1 && ids > 8 {
			id = plain(r.RequestID, ids-width(again)) + again
		}
		what, colour := r.Mode, ""
		if r.Running {
			what = r.Phase
		}
		if r.Error != "" {
			what, colour = r.Error, bad
		}
		cells := []string{"", pad(id, ids, false), v.paint(pad(plain(what, wordSize), wordSize, false), colour),
			pad(took(r.End), tookSize, true)}
		if v.bars() > 0 {
			cells = append(cells, v.bar(&r, longest))
		}
		lines = append(lines, strings.Join(cells, "  "))
	}
	if more := len(list) - most; more > 0 {
		lines = append(lines, v.paint(fmt.Sprintf("  and %d more", more), soft))
	}
	return lines
}

// took has three digits, so that a column of times is read at a glance.
func took(ms float64) string {
	s := min(max(ms/1000, 0), 99999)
	switch {
	case s < .9995:
		return fmt.Sprintf("%.0f ms", 1000*s)
	case s < 9.995:
		return fmt.Sprintf("%.2f s", s)
	case s < 99.95:
		return fmt.Sprintf("%.1f s", s)
	}
	return fmt.Sprintf("%.0f s", s)
}

// parts of a timeline: a letter for where there are no colours, and a colour and a bar for where there are. The bars
// differ, too: who sees no red or green tells the time before the first token from the stream by the height.
var parts = []struct{ letter, bar, colour, name string }{
	{".", "·", soft, "waits"}, {"P", "▆", "34", "prefill"}, {"h", "▆", "35", "handoff"},
	{"t", "▆", "33", "transfer and first token"}, {"s", "▃", "32", "stream"},
}

// scale tells how long the longest timeline is.
func (v *view) scale(longest float64) string {
	if v.bars() == 0 {
		return ""
	}
	return v.paint("   a whole bar is "+took(longest), soft)
}

func (v *view) legend() string {
	if v.bars() == 0 {
		return ""
	}
	text, size := "", width("ended ")
	for _, p := range parts {
		name, letter := p.name, p.letter
		if v.colours {
			letter = p.bar
		}
		if v.width < 80 { // the whole legend has 72 characters
			name, _, _ = strings.Cut(name, " ")
		}
		size += 4 + width(name)
		text += "  " + v.paint(letter, p.colour) + " " + v.paint(name, soft)
	}
	if size > v.width {
		return ""
	}
	return " " + text
}

// bar draws an attempt on the scale of the longest one.
func (v *view) bar(r *attempt, longest float64) string {
	at := func(t *float64, otherwise float64) float64 {
		if t == nil {
			return otherwise
		}
		return *t
	}
	decode := at(r.DecodeStart, r.End)
	prefill := at(r.PrefillStart, decode)
	handoff := at(r.PrefillEnd, decode)
	decode = max(decode, handoff)
	first := max(decode, at(r.FirstToken, r.End))
	if r.Running && r.Phase == "stream" { // when the first token came is known at the end
		first = decode
	}
	ends := []float64{prefill, handoff, decode, first, r.End}
	if r.Running && r.PrefillStart == nil && r.DecodeStart == nil { // only its phase is known
		now := max(0, slices.Index([]string{"pick", "prefill", "event", "decode", "stream"}, r.Phase))
		for i := range ends {
			ends[i] = 0
			if i >= now {
				ends[i] = r.End
			}
		}
	}
	var b strings.Builder
	drawn, all := 0, v.bars()
	for i, end := range ends {
		until := min(all, int(end/longest*float64(all)+0.5))
		if n := until - drawn; n > 0 {
			glyph := parts[i].letter
			if v.colours {
				glyph = parts[i].bar
			}
			b.WriteString(v.paint(strings.Repeat(glyph, n), parts[i].colour))
			drawn = until
		}
	}
	return b.String()
}

// paint colours a text where the terminal is to have colours.
func (v *view) paint(text, colour string) string {
	if !v.colours || colour == "" || text == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

// plain makes a text from the network safe for a terminal, and at most n characters long.
func plain(text string, n int) string {
	runes := []rune(strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, text))
	if len(runes) > n {
		runes = append(runes[:n-1], '…')
	}
	return string(runes)
}

func width(text string) int { return utf8.RuneCountInString(text) }

// pad fills a cell up to its size.
func pad(text string, size int, right bool) string {
	space := strings.Repeat(" ", max(size-width(text), 0))
	if right {
		return space + text
	}
	return text + space
}
