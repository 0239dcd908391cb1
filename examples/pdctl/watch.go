// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"
)

type watchCmd struct {
	Admin string        `default:"http://127.0.0.1:9000" placeholder:"URL" help:"${watch_admin}"`
	Every time.Duration `default:"1s" help:"How often to ask."`
	Once  bool          `help:"Print one picture and end."`
	JSON  bool          `name:"json" help:"Write what the gateway says, as JSON, one picture a line."`
	Rows  int           `default:"20" help:"How many ended attempts to show."`
	Color string        `enum:"auto,always,never" default:"auto" help:"auto, always or never; auto heeds NO_COLOR."`

	width int // of a timeline, in characters; tests use another
}

// picture is what the gateway's /debug/live/live.json says.
type picture struct {
	Time     time.Time `json:"time"`
	Draining bool      `json:"draining"`
	Models   []struct {
		Model     string             `json:"model"`
		Ready     bool               `json:"ready"`
		Reason    string             `json:"reason"`
		Connector string             `json:"connector"`
		Phases    map[string]float64 `json:"phases"`
		Totals    struct {
			Served float64            `json:"served"`
			Errors map[string]float64 `json:"errors"`
		} `json:"totals"`
		Endpoints []engineRow `json:"endpoints"`
	} `json:"models"`
	Requests []attempt `json:"requests"`
}

type engineRow struct {
	ID      string `json:"id"`
	Role    string `json:"role"`
	Phase   string `json:"phase"`
	Healthy bool   `json:"healthy"`
	Load    int    `json:"load"`
	Engine  *struct {
		Running int     `json:"running"`
		Waiting int     `json:"waiting"`
		KVUsage float64 `json:"kvUsage"`
	} `json:"engine"` // what it says of itself, if the gateway asks
}

// attempt has its times in ms since it began.
type attempt struct {
	RequestID    string   `json:"requestId"`
	Mode         string   `json:"mode"`
	Attempt      int      `json:"attempt"`
	PrefillStart *float64 `json:"prefillStart"`
	PrefillEnd   *float64 `json:"prefillEnd"`
	DecodeStart  *float64 `json:"decodeStart"`
	FirstToken   *float64 `json:"firstToken"`
	End          float64  `json:"end"`
	Error        string   `json:"error"`
	Running      bool     `json:"running"`
	Phase        string   `json:"phase"`
}

// maxPicture is the largest response that is read, in bytes.
const maxPicture = 8 << 20

// Run prints pictures until it is interrupted.
func (c *watchCmd) Run(s streams) error {
	if c.Every <= 0 || c.Rows < 0 {
		return errors.New("--every and --rows must not be negative, and --every not zero")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	c.width = cmp.Or(c.width, 40)
	var before *picture
	for {
		raw, now, err := c.ask(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && (c.Once || before == nil):
			return err
		case err != nil:
			fmt.Fprintln(s.err, "pdctl:", err)
		case c.JSON:
			_, _ = s.out.Write(append(raw, '\n'))
		default:
			text := c.draw(now, before)
			if !c.Once {
				text = "\x1b[H\x1b[2J" + text
			}
			_, _ = io.WriteString(s.out, text)
		}
		if now != nil {
			before = now
		}
		if c.Once {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(c.Every):
		}
	}
}

// ask fetches a picture, and its JSON on one line.
func (c *watchCmd) ask(ctx context.Context) ([]byte, *picture, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(c.Admin, "/")+"/debug/live/live.json",
		http.NoBody)
	if err != nil {
		return nil, nil, errors.New("--admin is no URL; write one like http://127.0.0.1:9000")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, nil, fmt.Errorf("the gateway's admin address %s does not answer: name it with --admin", c.Admin)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPicture))
	if err != nil {
		return nil, nil, errors.New("the gateway's response broke off")
	}
	if resp.StatusCode != http.StatusOK {
		return nil, nil, fmt.Errorf("the gateway answered with status %d: is %s its admin address, by an IP address "+
			"or localhost?", resp.StatusCode, c.Admin)
	}
	now := &picture{}
	line := &bytes.Buffer{}
	if json.Unmarshal(body, now) != nil || json.Compact(line, body) != nil {
		return nil, nil, errors.New("the response is not that of a gateway's live view")
	}
	return line.Bytes(), now, nil
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

func (c *watchCmd) draw(now, before *picture) string {
	var b strings.Builder
	state := "ready"
	if now.Draining {
		state = "draining"
	}
	fmt.Fprintf(&b, "pdkit gateway  %s  %s UTC\n", state, now.Time.UTC().Format(time.TimeOnly))
	for i := range now.Models {
		c.model(&b, now, before, i)
	}
	var running, ended []attempt
	longest := 1.0
	for _, r := range now.Requests {
		longest = max(longest, r.End)
		if r.Running {
			running = append(running, r)
		} else {
			ended = append(ended, r)
		}
	}
	fmt.Fprintf(&b, "\n%s\n", c.paint("in flight", "1"))
	c.requests(&b, running, longest, 5)
	fmt.Fprintf(&b, "\n%s   %s\n", c.paint("ended", "1"), c.legend())
	c.requests(&b, ended, longest, c.Rows)
	return b.String()
}

func (c *watchCmd) model(b *strings.Builder, now, before *picture, i int) {
	m := &now.Models[i]
	state := c.paint("ready", "32")
	if !m.Ready {
		state = c.paint(plain(cmp.Or(m.Reason, "not ready"), 60), "31")
	}
	inFlight := 0.0
	for _, n := range m.Phases {
		inFlight += n
	}
	rate := "–"
	if before != nil {
		for _, old := range before.Models {
			if seconds := now.Time.Sub(before.Time).Seconds(); old.Model == m.Model && seconds > 0 {
				rate = fmt.Sprintf("%.1f/s", max(0, m.Totals.Served-old.Totals.Served)/seconds)
			}
		}
	}
	fmt.Fprintf(b, "\n%s  %s  %s   in flight %.0f   served %s\n", c.paint(cmp.Or(plain(m.Model, 40), "any model"), "1"),
		plain(m.Connector, 30), state, inFlight, rate)
	fmt.Fprintf(b, "  %-28s %-8s %-10s %8s %6s %6s %5s\n", "engine", "role", "state", "requests", "runs", "waits", "KV")
	order := []string{"encode", "prefill", "both", "decode"}
	list := slices.Clone(m.Endpoints)
	slices.SortStableFunc(list, func(x, y engineRow) int {
		return cmp.Or(cmp.Compare(slices.Index(order, x.Role), slices.Index(order, y.Role)), cmp.Compare(x.ID, y.ID))
	})
	for _, e := range list {
		state, runs, waits, kv := fmt.Sprintf("%-10s", plain(e.Phase, 10)), "–", "–", "–"
		if e.Healthy && e.Phase == "ready" {
			state = c.paint(state, "32")
		} else {
			state = c.paint(state, "31")
		}
		if e.Engine != nil {
			runs, waits = strconv.Itoa(e.Engine.Running), strconv.Itoa(e.Engine.Waiting)
			kv = fmt.Sprintf("%.0f %%", 100*e.Engine.KVUsage)
		}
		fmt.Fprintf(b, "  %-28s %-8s %s %8d %6s %6s %5s\n", plain(e.ID, 28), plain(e.Role, 8), state, e.Load, runs,
			waits, kv)
	}
	var failed []string
	for _, code := range slices.Sorted(maps.Keys(m.Totals.Errors)) {
		failed = append(failed, fmt.Sprintf("%s %.0f", plain(code, 30), m.Totals.Errors[code]))
	}
	if len(failed) > 0 {
		fmt.Fprintf(b, "  failed attempts so far: %s\n", strings.Join(failed, ", "))
	}
}

func (c *watchCmd) requests(b *strings.Builder, list []attempt, longest float64, most int) {
	if len(list) == 0 {
		b.WriteString("  none\n")
	}
	for _, r := range list[:min(len(list), most)] {
		id := plain(r.RequestID, 20)
		if r.Attempt > 1 {
			id = plain(r.RequestID, 17) + fmt.Sprintf(" #%d", r.Attempt)
		}
		what := r.Mode
		if r.Running {
			what = r.Phase
		}
		word := fmt.Sprintf("%-16s", plain(cmp.Or(r.Error, what), 16))
		if r.Error != "" {
			word = c.paint(word, "31")
		}
		fmt.Fprintf(b, "  %-20s %s %s %9s\n", id, word, c.bar(&r, longest), took(r.End))
	}
	if more := len(list) - most; more > 0 {
		fmt.Fprintf(b, "  and %d more\n", more)
	}
}

func took(ms float64) string {
	return time.Duration(ms * float64(time.Millisecond)).Round(time.Millisecond).String()
}

// parts of a timeline: a letter, so that it can be read without colours, and a colour.
var parts = []struct{ letter, colour, name string }{
	{".", "90", "waits"}, {"P", "34", "prefill"}, {"h", "35", "handoff"}, {"t", "33", "transfer and first token"},
	{"s", "32", "stream"},
}

func (c *watchCmd) legend() string {
	var all []string
	for _, p := range parts {
		all = append(all, c.paint(p.letter, p.colour)+" "+p.name)
	}
	return strings.Join(all, ", ")
}

// bar draws an attempt on the scale of the longest one.
func (c *watchCmd) bar(r *attempt, longest float64) string {
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
	ends := []float64{prefill, handoff, decode, first, r.End}
	if r.Running { // only its phase is known
		now := max(0, slices.Index([]string{"pick", "prefill", "event", "decode", "stream"}, r.Phase))
		for i := range ends {
			ends[i] = 0
			if i >= now {
				ends[i] = r.End
			}
		}
	}
	var b strings.Builder
	drawn := 0
	for i, end := range ends {
		until := min(c.width, int(end/longest*float64(c.width)+0.5))
		if n := until - drawn; n > 0 {
			b.WriteString(c.paint(strings.Repeat(parts[i].letter, n), parts[i].colour))
			drawn = until
		}
	}
	return b.String() + strings.Repeat(" ", c.width-drawn)
}

// paint colours a text where the terminal is to have colours.
func (c *watchCmd) paint(text, colour string) string {
	if c.Color == "never" || c.Color == "auto" && (os.Getenv("NO_COLOR") != "" || !terminal(os.Stdout)) {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

func terminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
