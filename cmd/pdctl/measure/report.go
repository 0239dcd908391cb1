// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/url"
	"slices"
	"time"
)

// Report is what a run measured. Times are in milliseconds, and count from planned arrivals in an open loop.
type Report struct {
	Date        string    `json:"date"` // of the run's begin, in UTC: "2026-11-24 13:00"
	Load        string    `json:"load"` // in words
	Seed        uint64    `json:"seed"`
	SLO         *Limits   `json:"slo,omitempty"`
	Targets     []Summary `json:"targets"`
	Ratios      []Ratio   `json:"ratios,omitempty"` // of the second target to the first
	Unfinished  int       `json:"unfinished"`       // requests that were cut by the end of the run, and counted nowhere
	Interrupted bool      `json:"interrupted"`
	Warnings    []string  `json:"warnings,omitempty"`

	slo     SLO
	load    Load
	asked   int // tokens of generated prompts; 0 for others
	samples []sample
}

// Limits are an SLO as it is written.
type Limits struct {
	TTFT float64 `json:"ttftMs,omitempty"`
	TPOT float64 `json:"tpotMs,omitempty"`
	E2E  float64 `json:"e2eMs,omitempty"`
}

// Summary is what was measured of one target. Latencies are those of served requests.
type Summary struct {
	URL     string         `json:"url"` // without credentials
	Model   string         `json:"model"`
	Seconds float64        `json:"seconds"` // from the begin of the load to the end of the last response
	Served  int            `json:"served"`
	Failed  int            `json:"failed"`
	Errors  map[string]int `json:"errors,omitempty"` // by status and code
	Modes   map[string]int `json:"modes,omitempty"`  // served requests by X-PD-Mode

	RequestsPerSecond float64  `json:"requestsPerSecond"`
	TokensPerSecond   float64  `json:"tokensPerSecond"`            // of responses
	Goodput           *float64 `json:"goodputPerSecond,omitempty"` // requests a second that met the SLO
	PromptTokens      float64  `json:"promptTokens"`               // mean by usage; 0 if unknown
	Tokens            float64  `json:"tokens"`                     // mean of a response
	FromUsage         int      `json:"tokensFromUsage"`            // responses whose tokens the server told
	FromEvents        int      `json:"tokensFromEvents"`           // responses whose events with content were counted

	TTFT Quantiles  `json:"ttftMs"`          // time to the first token
	TPOT Quantiles  `json:"tpotMs"`          // time per output token: each request's mean time between tokens
	ITL  Quantiles  `json:"itlMs"`           // each time between two events with content, of all requests
	E2E  Quantiles  `json:"e2eMs"`           // end to end: to the end of the response
	Lag  *Quantiles `json:"lagMs,omitempty"` // how late the client sent requests of an open loop
}

// Quantiles of times, in milliseconds.
type Quantiles struct {
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
}

// Ratio is one number of the second target, divided by that of the first. Each round gives one; Median is the middle
// one.
type Ratio struct {
	Name   string  `json:"name"`
	Median float64 `json:"median"`
	Least  float64 `json:"least"`
	Most   float64 `json:"most"`
}

// Failed is how many requests to all targets failed.
func (r *Report) Failed() (n int) {
	for _, t := range r.Targets {
		n += t.Failed
	}
	return n
}

// Stopped reports whether the run was interrupted.
func (r *Report) Stopped() bool { return r.Interrupted }

// JSON writes the report as one object.
func (r *Report) JSON(w io.Writer) error { return writeJSON(w, r) }

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// quantiles sorts a list of times.
func quantiles(list []time.Duration) Quantiles {
	slices.Sort(list)
	at := func(percent int) float64 {
		if len(list) == 0 {
			return 0
		}
		rank := (percent*len(list) + 99) / 100 // the nearest rank: a time that was really measured
		return ms(list[rank-1])
	}
	return Quantiles{at(50), at(90), at(99)}
}

// good reports whether a request met the SLO.
func (o SLO) good(s *sample) bool {
	return s.fault == "" && (o.TTFT == 0 || s.first <= o.TTFT) && (o.TPOT == 0 || s.perToken() <= o.TPOT) &&
		(o.E2E == 0 || s.total <= o.E2E)
}

// summarise computes the numbers of one target's samples, which were measured within a time.
func summarise(samples []*sample, wall time.Duration, slo SLO, open bool) Summary {
	t := Summary{Seconds: wall.Seconds(), Errors: map[string]int{}, Modes: map[string]int{}}
	var first, perToken, gaps, total, lag []time.Duration
	var tokens, promptTokens, good int
	for _, s := range samples {
		lag = append(lag, s.lag)
		if s.fault != "" {
			t.Failed++
			t.Errors[s.fault]++
			continue
		}
		t.Served++
		if s.mode != "" {
			t.Modes[s.mode]++
		}
		first, total, gaps = append(first, s.first), append(total, s.total), append(gaps, s.gaps...)
		if s.count() > 1 {
			perToken = append(perToken, s.perToken())
		}
		tokens += s.count()
		promptTokens += s.promptTokens
		if s.tokens > 0 {
			t.FromUsage++
		} else {
			t.FromEvents++
		}
		if slo.good(s) {
			good++
		}
	}
	perSecond := func(n int) float64 { return float64(n) / max(t.Seconds, 1e-9) }
	t.RequestsPerSecond, t.TokensPerSecond = perSecond(t.Served), perSecond(tokens)
	if slo != (SLO{}) {
		t.Goodput = new(perSecond(good))
	}
	t.Tokens = float64(tokens) / float64(max(t.Served, 1))
	t.PromptTokens = float64(promptTokens) / float64(max(t.FromUsage, 1))
	t.TTFT, t.TPOT, t.ITL, t.E2E = quantiles(first), quantiles(perToken), quantiles(gaps), quantiles(total)
	if open {
		t.Lag = new(quantiles(lag))
	}
	return t
}

// report summarises the run.
func (r *run) report(interrupted bool) *Report {
	rep := &Report{Date: r.began.UTC().Format("2006-01-02 15:04"), Load: r.words(), Seed: r.Seed, slo: r.SLO,
		load: r.Load, samples: r.samples, Unfinished: r.dropped, Interrupted: interrupted}
	if g, ok := r.Prompts.(Generator); ok {
		rep.asked = g.PrefixTokens + g.PromptTokens
	}
	if r.SLO != (SLO{}) {
		rep.SLO = &Limits{ms(r.SLO.TTFT), ms(r.SLO.TPOT), ms(r.SLO.E2E)}
	}
	for i, target := range r.Targets {
		t := r.summary(i, -1)
		t.URL, t.Model = WithoutSecrets(target.URL), target.Model
		rep.Targets = append(rep.Targets, t)
	}
	if len(r.Targets) == 2 {
		rep.Ratios = r.ratios()
	}
	rep.warn()
	return rep
}

// summary is that of a target in one round; -1: in all.
func (r *run) summary(target, round int) Summary {
	var own []*sample
	for i := range r.samples {
		if s := &r.samples[i]; s.target == target && (round < 0 || s.round == round) {
			own = append(own, s)
		}
	}
	var wall time.Duration
	for key, took := range r.walls {
		if key[0] == target && (round < 0 || key[1] == round) {
			wall += took
		}
	}
	return summarise(own, wall, r.SLO, r.Load.Rate > 0)
}

// number is one that targets are compared by.
type number struct {
	name string
	of   func(*Summary) float64
}

// numbers lists them in the order of the report.
func numbers(slo SLO) []number {
	list := []number{
		{"requests/s", func(t *Summary) float64 { return t.RequestsPerSecond }},
		{"tokens/s", func(t *Summary) float64 { return t.TokensPerSecond }},
	}
	if slo != (SLO{}) {
		list = append(list, number{"goodput/s", func(t *Summary) float64 {
			if t.Goodput == nil {
				return 0
			}
			return *t.Goodput
		}})
	}
	for _, time := range []struct {
		name string
		of   func(*Summary) *Quantiles
	}{
		{"TTFT ms", func(t *Summary) *Quantiles { return &t.TTFT }},
		{"TPOT ms", func(t *Summary) *Quantiles { return &t.TPOT }},
		{"ITL ms", func(t *Summary) *Quantiles { return &t.ITL }},
		{"E2E ms", func(t *Summary) *Quantiles { return &t.E2E }},
	} {
		list = append(list,
			number{time.name + " p50", func(t *Summary) float64 { return time.of(t).P50 }},
			number{time.name + " p90", func(t *Summary) float64 { return time.of(t).P90 }},
			number{time.name + " p99", func(t *Summary) float64 { return time.of(t).P99 }})
	}
	return list
}

// ratios compares the targets round by round.
func (r *run) ratios() (all []Ratio) {
	var pairs [][2]Summary
	for round := range max(r.Rounds, 1) {
		a, b := r.summary(0, round), r.summary(1, round)
		if a.Served > 0 && b.Served > 0 {
			pairs = append(pairs, [2]Summary{a, b})
		}
	}
	for _, n := range numbers(r.SLO) {
		var list []float64
		for i := range pairs {
			if a, b := n.of(&pairs[i][0]), n.of(&pairs[i][1]); a > 0 && b > 0 {
				list = append(list, b/a)
			}
		}
		if len(list) == 0 {
			continue
		}
		slices.Sort(list)
		middle := (list[(len(list)-1)/2] + list[len(list)/2]) / 2
		all = append(all, Ratio{n.name, middle, list[0], list[len(list)-1]})
	}
	return all
}

// words tells the load.
func (r *run) words() string {
	text := fmt.Sprintf("closed loop, %d clients", r.Load.Clients)
	if r.Load.Clients == 1 {
		text = "closed loop, 1 client"
	}
	if r.Load.Rate > 0 {
		text = fmt.Sprintf("open loop, %.4g requests/s (Poisson)", r.Load.Rate)
	}
	text += r.Load.extent()
	if len(r.Targets) == 2 {
		text += fmt.Sprintf(" to each target, in %d slices", 4*max(r.Rounds, 1))
	}
	return text
}

// extent tells how long a load is.
func (l Load) extent() (text string) {
	if l.Requests > 0 {
		text += fmt.Sprintf(", %d requests", l.Requests)
	}
	if l.Duration > 0 {
		text += ", " + l.Duration.String()
	}
	return text
}

// lateClient is the lag from which on the client, not the server, may be what was measured.
const lateClient = 10 // ms

// warn says what a reader of the numbers must know.
func (r *Report) warn() {
	add := func(format string, args ...any) { r.Warnings = append(r.Warnings, fmt.Sprintf(format, args...)) }
	for i, t := range r.Targets {
		name := ""
		if len(r.Targets) == 2 {
			name = string(rune('A'+i)) + ": "
		}
		if t.Lag != nil && t.Lag.P99 > lateClient {
			add("%sthis client was late itself: 1 of 100 requests left %.0f ms or more after its arrival, which the "+
				"latencies contain. Lower the rate, or give the client more CPU", name, t.Lag.P99)
		}
		if d := t.PromptTokens - float64(r.asked); r.asked > 0 && t.FromUsage > 0 &&
			math.Abs(d) > max(0.1*float64(r.asked), 8) {
			add("%sprompts had %.0f tokens on average, not the %d that were asked for", name, t.PromptTokens, r.asked)
		}
		if t.FromEvents > 0 {
			add("%s%d of %d responses told no usage: their tokens are events with content, which may hold several "+
				"tokens each", name, t.FromEvents, t.Served)
		}
		if n := t.Served; n > 0 && n < 100 {
			add("%sp99 of %d requests is their maximum: send 100 or more", name, n)
		}
	}
	if r.Interrupted {
		add("the run was interrupted; %d requests were in flight and are not counted", r.Unfinished)
	}
}

// WithoutSecrets leaves out what a URL may hold beside the address.
func WithoutSecrets(text string) string {
	u, err := url.Parse(text)
	if err != nil {
		return "a target"
	}
	return cmp.Or((&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String(), "a target")
}
