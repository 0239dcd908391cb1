// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

// screen prints the story: plain text, with a little colour where a terminal shows it.
type screen struct {
	out    io.Writer
	colour bool
}

// wantsColour reports whether f is a terminal whose user has not declined colours (no-color.org).
func wantsColour(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0 && os.Getenv("NO_COLOR") == "" &&
		os.Getenv("TERM") != "dumb"
}

// ANSI colours.
const (
	bold   = "1"
	red    = "31"
	green  = "32"
	blue   = "34"
	yellow = "33"
	grey   = "90"
)

func (s *screen) paint(colour, text string) string {
	if !s.colour || text == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

func (s *screen) printf(format string, args ...any) { fmt.Fprintf(s.out, format, args...) }

// opening shows who takes part.
func (s *screen) opening(l *lab) {
	s.printf("%s\n\n", s.paint(bold, "One response, two engines"))
	for _, p := range []struct{ name, url, does string }{
		{"P", l.prefill.URL(), "reads the prompt, keeps a cache of it (KV)"},
		{"D", l.decode.URL(), "fetches that cache, writes the response"},
		{"S", l.alone.URL(), "does both alone, to compare with"},
		{"gateway", l.url, "asks P, then D, and streams D's response"},
	} {
		s.printf("  %-8s %-23s %s\n", p.name, p.url, p.does)
	}
	s.printf("\nThe engines are simulated. Their toy model writes gibberish, never at random:\n")
	s.printf("each letter depends on the whole cache. A wrong cache would give another text.\n")
}

// request announces a request. The response's text follows.
func (s *screen) request(n int, r request) {
	beginning := strings.Join(strings.Fields(r.prompt)[:9], " ")
	s.printf("\n%s\n", s.paint(bold, fmt.Sprintf("%d. %s", n, r.what)))
	s.printf("  prompt   %s ...\n  response ", beginning)
}

// token prints a piece of the response as it comes.
func (s *screen) token(text string) { s.printf("%s", text) }

// barWidth is the width of a timeline, in characters.
const barWidth = 36

// timeline draws both legs of a request over time and says what each did.
func (s *screen) timeline(a response, o pdflow.Outcome, handedOff bool) {
	begin := o.Prefill.Start
	whole := max(o.Decode.End.Sub(begin), 1)
	column := func(t time.Time) int { return int(float64(barWidth)*float64(t.Sub(begin))/float64(whole) + 0.5) }
	row := func(name, colour, sign string, leg pdflow.LegOutcome, did string) {
		from := min(column(leg.Start), barWidth-1) // the shortest leg is one character
		to := max(column(leg.End), from+1)
		bar := strings.Repeat(" ", from) + s.paint(colour, strings.Repeat(sign, to-from)) +
			strings.Repeat(" ", barWidth-to)
		s.printf("  %-8s %s %5d ms  %s\n", name, bar, leg.Duration().Milliseconds(), did)
	}
	decode := fmt.Sprintf("wrote %d tokens", a.tokens)
	if !handedOff {
		decode = "read, " + decode
	}
	s.printf("\n\n")
	row("P", blue, "#", o.Prefill, fmt.Sprintf("read %d tokens", a.prompt))
	row("D", yellow, "=", o.Decode, decode)
	s.printf("           |%s| %5d ms\n", strings.Repeat("-", barWidth-2), whole.Milliseconds())
}

// field is one member of the handoff, shortened.
type field struct{ key, value string }

// handoffOf reads what the last request to D said about P's KV. It returns nil if it said nothing.
func handoffOf(toDecode []enginesim.Request) []field {
	if len(toDecode) == 0 {
		return nil
	}
	var body struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	if json.Unmarshal(toDecode[len(toDecode)-1].Body, &body) != nil || len(body.Params) == 0 {
		return nil
	}
	var fields []field
	d := json.NewDecoder(bytes.NewReader(body.Params)) // reads the members in the order they were sent
	for _, err := d.Token(); err == nil && d.More(); {
		var key json.Token
		var value json.RawMessage
		if key, err = d.Token(); err == nil {
			err = d.Decode(&value)
		}
		if name, ok := key.(string); ok && err == nil {
			fields = append(fields, field{name, shorten(string(value))})
		}
	}
	return fields
}

func shorten(value string) string {
	const most, end = 28, 10
	if len(value) <= most {
		return value
	}
	return value[:most-end-3] + "..." + value[len(value)-end:]
}

// meaning explains the members that matter most.
var meaning = map[string]string{
	"remote_block_ids":  "<- in P's memory",
	"remote_host":       "<- where P is",
	"remote_num_tokens": "<- how much",
}

// handoff shows what P told D through the gateway.
func (s *screen) handoff(fields []field) {
	if fields == nil {
		s.printf("\n  handoff  none: this connector carries nothing from P's response to D\n")
		return
	}
	s.printf("\n  handoff  P's response says where its cache lies (kv_transfer_params). The\n")
	s.printf("           gateway puts that, unchanged, into D's request; D fetches the cache:\n\n")
	width := 0
	for _, f := range fields {
		width = max(width, len(f.key))
	}
	for _, f := range fields {
		s.printf(
			"%s\n", strings.TrimRight(fmt.Sprintf("    %-*s  %-28s %s", width, f.key, f.value, meaning[f.key]), " "),
		)
	}
}

// proof shows what was checked.
func (s *screen) proof(checks []check) {
	s.printf("\n%s\n", s.paint(bold, "Did D reuse what P computed?"))
	for _, c := range checks {
		mark := s.paint(green, "ok  ")
		if !c.ok {
			mark = s.paint(red, "FAIL")
		}
		s.printf("\n  %s     %-38s %s\n           %s\n", mark, c.claim, c.seen, s.paint(grey, c.where))
	}
	if verdict(checks) == nil {
		s.printf("\nYes: P read each prompt once, and D wrote each response from P's cache.\n")
	}
}

func (s *screen) failed(err error) {
	s.printf("\n%s %s\n", s.paint(red, "Failed:"), strings.ReplaceAll(err.Error(), "\n", "\n        "))
}
