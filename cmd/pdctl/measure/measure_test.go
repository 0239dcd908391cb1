// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func engine(t *testing.T, cfg enginesim.Config) *enginesim.Engine {
	t.Helper()
	e, err := enginesim.Start(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, e.Close()) })
	return e
}

// prompts are 100 words or so, which the simulated engine takes for 300 to 700 tokens.
var prompts = Generator{Seed: 1, Path: Completions, PromptTokens: 100, MaxTokens: 11}

func measured(t *testing.T, o Options) *Report {
	t.Helper()
	o.Seed = 1
	if o.Prompts == nil {
		o.Prompts = prompts
	}
	r, err := Run(t.Context(), o)
	require.NoError(t, err)
	return r
}

func at(urls ...string) (all []Target) {
	for _, url := range urls {
		all = append(all, Target{url, "tiny"})
	}
	return all
}

// An engine that computes 5,000 tokens a second needs about 90 ms for such a prompt, and then 10 ms for each token. A
// busy machine makes it slower, never faster.
func TestTTFTAndITLAreThoseOfTheEngine(t *testing.T) {
	for name, load := range map[string]Load{
		"open":   {Rate: 20, Requests: 20},
		"closed": {Clients: 4, Requests: 20},
	} {
		t.Run(name, func(t *testing.T) {
			// each its own: an engine knows the prompts of the run before
			e := engine(t, enginesim.Config{PrefillRate: 5000, ITL: 10 * time.Millisecond})
			s := measured(t, Options{Targets: at(e.URL() + "/v1/"), Load: load}).Targets[0]
			assert.Equal(t, 20, s.Served, s.Errors)
			assert.Equal(t, 20, s.FromUsage)
			assert.Equal(t, 11.0, s.Tokens)
			assert.InDelta(t, 480, s.PromptTokens, 60)
			assert.Less(t, 60.0, s.TTFT.P50)
			assert.Greater(t, 10_000.0, s.TTFT.P50)
			assert.Greater(t, s.ITL.P50, 9.0) // milliseconds; a busy machine adds to it
			assert.Greater(t, s.TPOT.P50, 9.0)
			assert.LessOrEqual(t, s.TPOT.P99, s.ITL.P99, "a request's mean hides its slowest token")
			assert.LessOrEqual(t, s.TTFT.P50+90, s.E2E.P50)
			assert.LessOrEqual(t, s.TTFT.P50, s.TTFT.P90)
			assert.LessOrEqual(t, s.TTFT.P90, s.TTFT.P99)
			assert.InDelta(t, s.TokensPerSecond, 11*s.RequestsPerSecond, .01)
			assert.Equal(t, name == "open", s.Lag != nil)
			if s.Lag != nil {
				assert.Positive(t, s.Lag.P50, "no request leaves before its arrival")
			}
		})
	}
}

// An engine that serves one request at a time, of 50 ms, cannot follow 100 arrivals a second: requests wait, and their
// TTFT says so, although each was served fast once its turn had come.
func TestLatencyCountsFromTheArrival(t *testing.T) {
	slow := httptest.NewServer(oneAtATime(50 * time.Millisecond))
	defer slow.Close()
	s := measured(t, Options{Targets: at(slow.URL), Load: Load{Rate: 100, Requests: 20}}).Targets[0]
	assert.Equal(t, 20, s.Served, s.Errors)
	assert.Less(t, 700.0, s.TTFT.P99, "the last of 20 waits for those before it")
	assert.Greater(t, 25.0, s.RequestsPerSecond)
}

func oneAtATime(takes time.Duration) http.Handler {
	turn := make(chan struct{}, 1)
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		turn <- struct{}{}
		defer func() { <-turn }()
		time.Sleep(takes)
		_, _ = w.Write([]byte("data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n"))
	})
}

func TestGoodputDependsOnTheSLO(t *testing.T) {
	load := Load{Clients: 2, Requests: 10}
	for name, c := range map[string]struct {
		slo SLO
		all bool
	}{
		"met":        {SLO{TTFT: time.Minute, TPOT: time.Minute}, true},
		"TTFT alone": {SLO{TTFT: time.Minute}, true},
		"late first": {SLO{TTFT: 10 * time.Millisecond, TPOT: time.Minute}, false},
		"late end":   {SLO{E2E: 10 * time.Millisecond}, false},
		"in time":    {SLO{E2E: time.Minute}, true},
		"slow after": {SLO{TTFT: time.Minute, TPOT: time.Nanosecond}, false}, // the reader may be late for the first
	} {
		e := engine(t, enginesim.Config{PrefillRate: 10000, ITL: 5 * time.Millisecond})
		s := measured(t, Options{Targets: at(e.URL()), Load: load, SLO: c.slo}).Targets[0]
		require.NotNil(t, s.Goodput, name)
		if c.all {
			assert.Equal(t, s.RequestsPerSecond, *s.Goodput, name)
		} else {
			assert.Zero(t, *s.Goodput, name)
		}
	}
	e := engine(t, enginesim.Config{})
	assert.Nil(t, measured(t, Options{Targets: at(e.URL()), Load: load}).Targets[0].Goodput)
}

func TestFaultsAreCountedByTheirCodes(t *testing.T) {
	e := engine(t, enginesim.Config{})
	for want, fault := range map[string]enginesim.Fault{
		"503 overloaded": {Kind: enginesim.FaultStatus, Status: 503,
			Body: `{"error":{"message":"the prompt is secret","code":"overloaded"}}`},
		"429": {Kind: enginesim.FaultStatus, Status: 429,
			Body: `{"error":{"message":"the prompt","code":"the prompt"}}`},
		faultConnect: {Kind: enginesim.FaultReset},
		faultBroken:  {Kind: enginesim.FaultResetStream, AfterChunks: 3},
		faultTimeout: {Kind: enginesim.FaultStallStream, AfterChunks: 3},
		faultEnd:     {Kind: enginesim.FaultGarbage},
		faultError + " InternalServerError": {Kind: enginesim.FaultGarbage,
			Body: "data: {\"error\":{\"type\":\"InternalServerError\",\"code\":500}}\n\ndata: [DONE]\n\n"},
		faultEmpty: {Kind: enginesim.FaultGarbage, Body: "data: [DONE]\n\n"},
		faultAbort: {Kind: enginesim.FaultGarbage, Body: "data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":" +
			"\"abort\"}]}\n\ndata: [DONE]\n\n"},
	} {
		fault.Count = 2
		e.Inject(fault)
		limit := 20 * time.Second
		if want == faultTimeout {
			limit = 2 * time.Second // which the requests that are served do not need
		}
		r := measured(t, Options{Targets: at(e.URL()), Load: Load{Clients: 1, Requests: 5}, Timeout: limit})
		assert.Equal(t, map[string]int{want: 2}, r.Targets[0].Errors)
		assert.Equal(t, 3, r.Targets[0].Served, want)
		assert.Equal(t, 2, r.Failed())
		e.ClearFaults()
	}
}

// B needs twelve times as long for a token, and the same for a prompt. A busy machine adds to both.
func TestTwoTargetsAreToldApart(t *testing.T) {
	a := engine(t, enginesim.Config{ITL: 5 * time.Millisecond})
	b := engine(t, enginesim.Config{ITL: 60 * time.Millisecond})
	r := measured(t, Options{Targets: at(a.URL(), b.URL()), Load: Load{Clients: 2, Requests: 12}, Rounds: 3})
	require.Len(t, r.Targets, 2)
	assert.Equal(t, 12, r.Targets[0].Served)
	assert.Equal(t, 12, r.Targets[1].Served)
	for _, ratio := range r.Ratios {
		assert.LessOrEqual(t, ratio.Least, ratio.Median, ratio.Name)
		assert.LessOrEqual(t, ratio.Median, ratio.Most, ratio.Name)
		switch ratio.Name {
		case "ITL ms p50", "E2E ms p50":
			assert.Less(t, 1.5, ratio.Median, ratio.Name)
		case "requests/s", "tokens/s":
			assert.Greater(t, 0.8, ratio.Median, ratio.Name)
		}
	}
	assert.NotEmpty(t, r.Ratios)
	requests := a.Requests()
	require.Len(t, requests, 12)
	for _, request := range requests {
		for _, other := range b.Requests() {
			assert.NotEqual(t, request.Body, other.Body, "each has prompts of its own")
		}
	}
}

func TestTargetsTakeTurns(t *testing.T) {
	r := run{Options: Options{Targets: at("a", "b"), Rounds: 2, Load: Load{Requests: 10, Duration: 8 * time.Second}}}
	var order strings.Builder
	requests := [2]int{}
	for _, s := range r.slices() {
		order.WriteByte("AB"[s.target])
		requests[s.target] += s.requests
		assert.Equal(t, 2*time.Second, s.lasts)
	}
	assert.Equal(t, "ABBAABBA", order.String())
	assert.Equal(t, [2]int{10, 10}, requests)
}

func TestASeedRepeatsPromptsAndArrivals(t *testing.T) {
	e := engine(t, enginesim.Config{})
	bodies := func(seed uint64) (all []string) {
		before := len(e.Requests())
		generator := prompts
		generator.Seed, generator.Prefixes, generator.PrefixTokens = seed, 3, 20
		measured(t, Options{Targets: at(e.URL()), Load: Load{Clients: 1, Requests: 8}, Prompts: generator})
		for _, r := range e.Requests()[before:] {
			all = append(all, string(r.Body))
		}
		return all
	}
	first := bodies(7)
	assert.Len(t, first, 8)
	assert.Equal(t, first, bodies(7))
	assert.NotEqual(t, first, bodies(8))
	begins := map[string]int{}
	whole := map[string]int{}
	for n := range 50 {
		text, ok := Generator{Seed: 7, Path: Completions, Prefixes: 3, PrefixTokens: 20, PromptTokens: 20}.
			Prompt(0, n).Body["prompt"].(string)
		require.True(t, ok)
		fields := strings.Fields(text)
		assert.Len(t, fields, 40)
		begins[strings.Join(fields[:20], " ")]++
		whole[text]++
	}
	assert.Len(t, begins, 3)
	assert.Len(t, whole, 50)
}

// The end of ctx ends a run whose server never answers. What ended before is reported.
func TestAnInterruptedRunReportsWhatItHas(t *testing.T) {
	var asked, held atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if asked.Add(1) > 8 {
			held.Add(1)
			<-r.Context().Done()
			return
		}
		_, _ = w.Write([]byte("data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n"))
	}))
	defer server.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, err := Run(ctx, Options{Targets: at(server.URL), Load: Load{Clients: 2, Duration: time.Hour}, Prompts: prompts,
		Progress: func(p Progress) {
			if p.Ended > 0 && p.InFlight == 2 && held.Load() == 2 { // no client is between two requests
				cancel()
			}
		}})
	require.NoError(t, err)
	assert.True(t, r.Interrupted)
	assert.Equal(t, 8, r.Targets[0].Served)
	assert.Zero(t, r.Failed(), "what was cut is nobody's failure")
	assert.Equal(t, 2, r.Unfinished)
	assert.Contains(t, strings.Join(r.Warnings, "\n"), "2 requests were in flight")
}

func TestWithoutUsageEventsAreCounted(t *testing.T) {
	s := httptest.NewServer(oneAtATime(0))
	defer s.Close()
	r := measured(t, Options{Targets: at(s.URL), Load: Load{Clients: 1, Requests: 3}})
	assert.Equal(t, 3, r.Targets[0].FromEvents)
	assert.Equal(t, 1.0, r.Targets[0].Tokens)
	assert.Contains(t, r.Warnings[0], "3 of 3 responses told no usage")
	var text bytes.Buffer
	require.NoError(t, r.Text(&text))
	assert.Contains(t, text.String(), "counted by events with content")
}

func TestALateClientIsTold(t *testing.T) {
	r := &Report{Targets: []Summary{{Lag: &Quantiles{P99: 25}}, {Lag: &Quantiles{P99: 1}}}}
	r.warn()
	require.Len(t, r.Warnings, 1)
	assert.Contains(t, r.Warnings[0], "A: this client was late itself: 1 of 100 requests left 25 ms")
}

// Quantiles are times that were measured: the nearest rank.
func TestQuantiles(t *testing.T) {
	var list []time.Duration
	for i := 100; i > 0; i-- {
		list = append(list, time.Duration(i)*time.Millisecond)
	}
	assert.Equal(t, Quantiles{50, 90, 99}, quantiles(list))
	assert.Equal(t, Quantiles{1, 1, 1}, quantiles(list[:1]))
	assert.Equal(t, Quantiles{}, quantiles(nil))
}

func TestFilesOfPrompts(t *testing.T) {
	got, err := ReadPrompts(strings.NewReader(`{"prompt":"a","max_tokens":3,"top_p":0.5}

{"messages":[{"role":"user","content":"b"}]}
`), 9)
	require.NoError(t, err)
	for n, want := range []string{
		`{"Path":"/v1/completions","Body":{"max_tokens":3,"prompt":"a","top_p":0.5}}`,
		`{"Path":"/v1/chat/completions","Body":{"max_tokens":9,"messages":[{"role":"user","content":"b"}]}}`,
		`{"Path":"/v1/completions","Body":{"max_tokens":3,"prompt":"a","top_p":0.5}}`,
	} {
		text, err := json.Marshal(got.Prompt(1, n))
		require.NoError(t, err)
		assert.Equal(t, want, string(text))
	}
	for text, want := range map[string]string{
		"":                               "it has no prompt",
		"secret":                         "line 1 is not a JSON object",
		"\n[1]":                          "line 2 is not a JSON object",
		`{"max_tokens":3}`:               "line 1 needs either prompt or messages",
		`{"prompt":"","messages":[]}`:    "line 1 needs either prompt or messages",
		`{"prompt":"a"}` + "\n" + "null": "line 2 is not a JSON object",
	} {
		_, err := ReadPrompts(strings.NewReader(text), 9)
		assert.EqualError(t, err, want)
	}
}

// Reports name targets without keys, and hold no prompt.
func TestReportsKeepSecrets(t *testing.T) {
	e := engine(t, enginesim.Config{})
	url := strings.Replace(e.URL(), "http://", "http://user:hush@", 1)
	lines, err := ReadPrompts(strings.NewReader(`{"prompt":"confidential words"}`), 5)
	require.NoError(t, err)
	r := measured(t, Options{Targets: at(url), Load: Load{Clients: 1, Requests: 3}, Prompts: lines,
		Header: http.Header{"Authorization": {"Bearer hush"}}})
	assert.Equal(t, 3, r.Targets[0].Served, r.Targets[0].Errors)
	var all bytes.Buffer
	require.NoError(t, r.Text(&all))
	require.NoError(t, r.JSON(&all))
	require.NoError(t, r.HTML(&all))
	assert.NotContains(t, all.String(), "hush")
	assert.NotContains(t, all.String(), "confidential")
	assert.Contains(t, all.String(), e.URL())
	var back Report
	var text bytes.Buffer
	require.NoError(t, r.JSON(&text))
	require.NoError(t, json.Unmarshal(text.Bytes(), &back))
	assert.Equal(t, r.Targets[0].TTFT, back.Targets[0].TTFT)
	assert.Equal(t, 3, back.Targets[0].Served)
}

// A run in which nothing was served is drawn, too.
func TestAnEmptyReportIsDrawn(t *testing.T) {
	r := &Report{Targets: []Summary{{}, {}}, slo: SLO{TTFT: time.Second}}
	var picture bytes.Buffer
	require.NoError(t, r.PNG(&picture))
	assert.True(t, bytes.HasPrefix(picture.Bytes(), []byte("\x89PNG")))
}

func TestTicksAreRoundNumbers(t *testing.T) {
	for most, want := range map[float64]string{1: "0.0 0.2 0.4 0.6 0.8 1.0", 100: "0 20 40 60 80 100",
		262.5: "0 50 100 150 200 250",
		0.03:  "0.000 0.005 0.010 0.015 0.020 0.025 0.030", 7300: "0 2000 4000 6000"} {
		var labels []string
		for _, tick := range ticks(0, most) {
			labels = append(labels, tick.Label)
		}
		assert.Equal(t, want, strings.Join(labels, " "))
	}
}

func TestOptionsThatMakeNoSense(t *testing.T) {
	for want, o := range map[string]Options{
		"one target, or two to compare":       {},
		"either a rate or a number of":        {Targets: at("a")},
		"neither a duration nor a number":     {Targets: at("a"), Load: Load{Rate: 1}},
		"no prompts":                          {Targets: at("a"), Load: Load{Rate: 1, Requests: 1}},
		"either a rate or a number of client": {Targets: at("a"), Load: Load{Rate: 1, Clients: 1, Requests: 1}},
	} {
		_, err := Run(t.Context(), o)
		assert.ErrorContains(t, err, want)
	}
}

// A simulated engine makes five tokens of a word or so. With the generator's own idea of a word the prompts are too
// long, and the report says so.
func TestPromptsHaveTheLengthThatWasAsked(t *testing.T) {
	e := engine(t, enginesim.Config{})
	for _, path := range []string{Completions, Chat} {
		g := Generator{Seed: 1, Path: path, PrefixTokens: 100, PromptTokens: 200, Prefixes: 1, MaxTokens: 2}
		o := Options{Targets: at(e.URL()), Load: Load{Clients: 2, Requests: 20}, Prompts: g}
		r := measured(t, o)
		assert.Greater(t, r.Targets[0].PromptTokens, 600.0)
		require.NotEmpty(t, r.Warnings)
		assert.Regexp(t, `^prompts had 1?\d{3} tokens on average, not the 300 that were asked for$`, r.Warnings[0])

		o.Prompts = g.Sized(t.Context(), o)
		r = measured(t, o)
		assert.InDelta(t, 300, r.Targets[0].PromptTokens, 25)
		assert.NotContains(t, strings.Join(r.Warnings, "\n"), "asked for")
		assert.Contains(t, strings.Join(r.Notes(), "\n"), " in (300 asked)")
	}
	silent := httptest.NewServer(oneAtATime(0))
	defer silent.Close()
	assert.Equal(t, prompts, prompts.Sized(t.Context(), Options{Targets: at(silent.URL)}), "no usage, no idea")
}

// A sweep has a row for each load, whose prompts no load before it had.
func TestASweepIsACurve(t *testing.T) {
	e := engine(t, enginesim.Config{ITL: time.Millisecond})
	o := Options{Targets: at(e.URL()), Seed: 1, Prompts: prompts, SLO: SLO{TTFT: time.Minute}}
	c, err := Sweep(t.Context(), o, []Load{{Clients: 1, Requests: 5}, {Clients: 4, Requests: 5}})
	require.NoError(t, err)
	require.Len(t, c.Points, 2)
	assert.Zero(t, c.Failed())
	assert.False(t, c.Stopped())
	seen := map[string]bool{}
	for _, r := range e.Requests() {
		seen[string(r.Body)] = true
	}
	assert.Len(t, seen, 10)
	table := c.Table()
	require.Len(t, table, 3)
	assert.Equal(t, "clients requests/s tokens/s goodput/s TTFT ms p50", strings.Join(table[0][:5], " "))
	assert.Equal(t, "1", table[1][0])
	assert.Equal(t, "4", table[2][0])
	var text, raw, page bytes.Buffer
	require.NoError(t, c.Text(&text))
	assert.Contains(t, text.String(), "closed loops of 1, 4 clients, 5 requests each; seed 1;")
	assert.Contains(t, text.String(), "warning: 1, 4: p99 of 5 requests is their maximum", "each is told once")
	require.NoError(t, c.JSON(&raw))
	assert.Len(t, gjson.GetBytes(raw.Bytes(), "points.#.targets.0.tpotMs.p50").Array(), 2)
	require.NoError(t, c.HTML(&page))
	assert.Contains(t, page.String(), "<th>4</th>")
	assert.Contains(t, page.String(), "data:image/png")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c, err = Sweep(ctx, o, []Load{{Rate: 1, Requests: 5}, {Rate: 2, Requests: 5}})
	require.NoError(t, err)
	assert.Len(t, c.Points, 1)
	assert.True(t, c.Stopped())
	require.NoError(t, c.PNG(io.Discard), "of nothing, too")
}

func TestTheReasonIsTold(t *testing.T) {
	for url, want := range map[string]string{"http://127.0.0.1:1": "no connection: connection refused",
		"http://nobody.invalid": "no connection: no such host"} {
		s := measured(t, Options{Targets: at(url), Load: Load{Clients: 1, Requests: 1}}).Targets[0]
		require.Len(t, s.Errors, 1)
		for got := range s.Errors {
			if strings.HasPrefix(got, "no connection: no such host") || !strings.Contains(url, "invalid") {
				assert.Equal(t, want, got)
			} // a machine without a name server has another reason
		}
	}
}

// The legend stands above the curves, which end at 100 %.
func TestTheLegendIsNotOverTheCurve(t *testing.T) {
	r := &Report{Targets: []Summary{{}, {}}, samples: []sample{{first: time.Millisecond},
		{target: 1, first: 9 * time.Millisecond}}}
	first := func(s *sample) []time.Duration { return []time.Duration{s.first} }
	p, err := r.distribution("", 5*time.Millisecond, first)
	require.NoError(t, err)
	assert.True(t, p.Legend.Top)
	assert.GreaterOrEqual(t, p.Y.Max, 100+3*8.0, "room for A, B and the SLO")
}
