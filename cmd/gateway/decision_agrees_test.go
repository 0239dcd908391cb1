// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
)

// With events, a decision and limits at once, the header, the metrics and the engines' own counts agree.
func TestDecisionsByEventsUnderLimitsAgreeWithTheEngines(t *testing.T) {
	t.Parallel()
	for name, decision := range map[string]string{"threshold": "{mode: threshold, uncachedTokens: 100}",
		"predicted": "{mode: predicted}"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			engines := publishers(t, 2, nil)
			g := start(t, gatewayYAML("")+simYAML(followed+"  decision: "+decision+"\n  admission: {mode: fixed, "+
				"inFlightPerPrefill: 4, inFlightPerDecode: 4}\n", engines...), "-pick", "kv")
			g.exact(4)
			modes, asked := map[string]int{}, 0
			say := func(text string) string {
				status, h, body := g.complete(fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":4}`, text))
				require.Equal(t, http.StatusOK, status, body)
				mode := h.Get("X-PD-Mode")
				modes[mode]++
				asked++
				return mode
			}
			long := strings.Repeat("a long conversation ", 100)
			first := say(long)
			if name == "threshold" {
				assert.Equal(t, "disaggregated", first, "nobody has any of it")
				eventually(t, func() bool { return say(fmt.Sprint(long, asked)) == "aggregated" })
			}
			for i := range 4 {
				say(fmt.Sprint(long, " and more ", i))
				say(fmt.Sprint(i, strings.Repeat(" another", 100)))
			}
			page := g.page("/metrics")
			assert.Equal(t, asked, sum(page, "pd_decisions_total"), grepPD(page))
			assert.Equal(t, modes["aggregated"], sum(page, "pd_decisions_total", `pd_action="decode_alone"`),
				grepPD(page))
			assert.Equal(t, modes["disaggregated"], sum(page, "pd_attempts_total", `pd_mode="disaggregated"`))
			assert.Equal(t, asked, sum(page, "pd_kv_events_prompts_total", `pd_outcome="told"`), "each prompt is new")
			assert.Zero(t, sum(page, "pd_kv_events_prompts_total", `pd_outcome="failed"`))
			assert.Positive(t, sum(page, "pd_kv_events_batches_total"))
			var p, d int
			for i := 0; i < len(engines); i += 2 {
				p += posted(engines[i], "/v1/completions")
				d += posted(engines[i+1], "/v1/completions")
			}
			assert.Equal(t, modes["disaggregated"], p)
			assert.Equal(t, asked, d)
		})
	}
}

// What SGLang's decode engines cannot do alone they are never asked for.
func TestWhatAConnectorForbidsStaysForbiddenWhateverIsDecided(t *testing.T) {
	t.Parallel()
	for _, decision := range []string{"never", "threshold, minPromptTokens: 100000", "predicted"} {
		t.Run(decision, func(t *testing.T) {
			t.Parallel()
			c := protocol{connector: "sglang", attributes: bootstrapPort,
				spec: "  decision: {mode: " + decision + "}\n"}
			x := c.start(t)
			for i := range 3 {
				request := body(connector.APICompletions, 700+i, false)
				status, h, got := x.gateway.complete(request)
				require.Equal(t, http.StatusOK, status, got)
				assert.Equal(t, "disaggregated", h.Get("X-PD-Mode"))
				_, _, want := do(t, http.MethodPost, x.alone.URL()+"/v1/completions", request)
				assert.Equal(t, texts(t, want), texts(t, got))
			}
		})
	}
}

// Several samples and tools get what one engine would say.
func TestWhatStaysAtDecodeIsServedWhole(t *testing.T) {
	t.Parallel()
	for _, decision := range []string{"never", "threshold, minPromptTokens: 100000"} {
		t.Run(decision, func(t *testing.T) {
			t.Parallel()
			c := protocol{connector: "nixl", spec: "  decision: {mode: " + decision + "}\n"}
			x := c.start(t)
			post := func(path, body, choice string) string {
				status, h, got := do(t, http.MethodPost, x.gateway.client+path, body)
				require.Equal(t, http.StatusOK, status, got)
				assert.Equal(t, "aggregated", h.Get("X-PD-Mode"), path)
				if choice != "" {
					_, _, want := do(t, http.MethodPost, x.alone.URL()+path, body)
					assert.Equal(t, gjson.Get(want, choice).Raw, gjson.Get(got, choice).Raw)
				}
				return got
			}
			post("/v1/completions", `{"model":"tiny","prompt":"two of it","n":2,"max_tokens":5}`, "choices.#.text")
			post("/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"hi"}],"max_tokens":5,`+
				`"tools":[{"type":"function","function":{"name":"look","parameters":{"type":"object"}}}]}`,
				"choices.#.message")
			assert.Zero(t, posted(x.p, "/v1/completions")+posted(x.p, "/v1/chat/completions"))
		})
	}
}

// A change of what is decided leaves the streams that run alone.
func TestAReloadOfTheDecisionHarmsNoStream(t *testing.T) {
	t.Parallel()
	g, p, d := startHTTP(t, "", "")
	hold := d.holds()
	var open []*stream
	for i, decision := range []string{"{mode: never}", "{mode: threshold, minPromptTokens: 10}", "{mode: predicted}",
		"{mode: never, dryRun: true}", "{mode: always}"} {
		open = append(open, g.stream("/v1/completions", `{"model":"m","stream":true,"prompt":"hi"}`))
		g.configure(gatewayYAML("") + pairYAML("m", p, d, "  decision: "+decision+"\n"))
		g.logs(i+1, reloadedLine)
	}
	close(hold)
	for i, s := range open {
		assert.Equal(t, http.StatusOK, s.resp.StatusCode)
		assert.Equal(t, "data: [DONE]", s.rest(t), i)
	}
	eventually(t, func() bool { return sum(g.page("/metrics"), "pd_requests_active") == 0 })
}

// Only where no request is ever split is a model ready without prefill engines; none is without decode engines.
func TestWhichSideAModelNeedsDependsOnWhatIsDecided(t *testing.T) {
	t.Parallel()
	for decision, want := range map[string]int{"{mode: always}": http.StatusServiceUnavailable,
		"{mode: threshold, minPromptTokens: 10}": http.StatusServiceUnavailable,
		"{mode: predicted}":                      http.StatusServiceUnavailable,
		"{mode: never, dryRun: true}":            http.StatusServiceUnavailable,
		"{mode: never}":                          http.StatusOK} {
		spec := "  decision: " + decision + "\n"
		e := newEngine(t, "m")
		g := start(t, gatewayYAML("")+serverYAML("m", spec, entry(e.URL, "decode", nil)))
		status, said := g.ready()
		assert.Equal(t, want, status, "%s %s", decision, said)
		status, _, said = g.complete(prompt(50))
		assert.Equal(t, want, status, "%s %s", decision, said)
		g = start(t, gatewayYAML("")+serverYAML("m", spec, entry(e.URL, "prefill", nil)))
		status, said = g.ready()
		assert.Equal(t, http.StatusServiceUnavailable, status, "%s %s", decision, said)
		before := e.count()
		status, _, said = g.complete(prompt(50))
		assert.Equal(t, http.StatusServiceUnavailable, status, "%s %s", decision, said)
		assert.Equal(t, before, e.count(), "nothing is sent")
	}
}

// decisions are the modes that may keep a request at decode.
var decisions = []string{"never", "threshold, minPromptTokens: 100000", "predicted"}

// gets returns which of the engines got requests of a path since the last call, by their index.
func gets(engines []*enginesim.Engine, path string, seen []int) (by []int) {
	for i, e := range engines {
		n := posted(e, path)
		if n > seen[i] {
			by = append(by, i)
		}
		seen[i] = n
	}
	return by
}

// What refers to a response is served where the response is, by one engine or two.
func TestWhatRefersToAResponseGoesToItsEngineWhateverIsDecided(t *testing.T) {
	t.Parallel()
	for _, decision := range decisions {
		t.Run(decision, func(t *testing.T) {
			t.Parallel()
			c := enginesim.Config{KeepResponses: true, KeepRequests: 4096}
			p1, d1 := simPair(t, c, c)
			p2, d2 := simPair(t, c, c)
			p3, d3 := simPair(t, c, c)
			alone := newSim(t, enginesim.Config{KeepResponses: true})
			g := start(t, gatewayYAML("")+simYAML("  decision: {mode: "+decision+"}\n", p1, d1, p2, d2, p3, d3),
				"-inspect", "100ms")
			ask := func(url string, i int, more string) gjson.Result {
				status, _, body := do(t, http.MethodPost, url+responsesPath, fmt.Sprintf(
					`{"model":"tiny","input":"%d %s","max_output_tokens":4%s}`, i, strings.Repeat("word ", i*20), more))
				require.Equal(t, http.StatusOK, status, body)
				return gjson.Parse(body)
			}
			d, seen := []*enginesim.Engine{d1, d2, d3}, make([]int, 3)
			for i := range 12 {
				first, want := ask(g.client, i, ""), ask(alone.URL(), i, "")
				at := gets(d, responsesPath, seen)
				require.Len(t, at, 1)
				for range 2 {
					refers := func(r gjson.Result) string { return `,"previous_response_id":"` + r.Get("id").Str + `"` }
					first, want = ask(g.client, i, refers(first)), ask(alone.URL(), i, refers(want))
					assert.Equal(t, at, gets(d, responsesPath, seen))
					assert.Equal(t, want.Get("output.#.content").Raw, first.Get("output.#.content").Raw)
				}
				status, _, body := do(t, http.MethodGet, g.client+responsesPath+"/"+first.Get("id").Str, "")
				assert.Equal(t, http.StatusOK, status, body)
			}
		})
	}
}

// A decision that names no engine leaves the choice to the policy of -pick, also where one engine serves.
func TestASessionKeepsItsDecodeEngineWhereADecisionNamesNone(t *testing.T) {
	t.Parallel()
	for _, decision := range []string{"never", "threshold, minPromptTokens: 30"} {
		t.Run(decision, func(t *testing.T) {
			t.Parallel()
			c := enginesim.Config{KeepRequests: 4096}
			p1, d1 := simPair(t, c, c)
			p2, d2 := simPair(t, c, c)
			p3, d3 := simPair(t, c, c)
			g := start(t, gatewayYAML("")+simYAML("  decision: {mode: "+decision+"}\n", p1, d1, p2, d2, p3, d3),
				"-pick", "session=X-S")
			d, seen := []*enginesim.Engine{d1, d2, d3}, make([]int, 3)
			modes := map[string]bool{}
			for s := range 4 {
				var home []int
				for i := range 6 { // short and long in turn
					status, h, body := g.complete(fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":2}`,
						strings.Repeat("word ", 1+40*(i%2))), "X-S", fmt.Sprint("session ", s))
					require.Equal(t, http.StatusOK, status, body)
					modes[h.Get("X-PD-Mode")] = true
					at := gets(d, "/v1/completions", seen)
					if i == 0 {
						home = at
					}
					assert.Equal(t, home, at)
				}
			}
			assert.Len(t, modes, map[bool]int{true: 1, false: 2}[decision == "never"])
		})
	}
}

// Media go through the encode stage, and so to two engines, whatever is decided of texts.
func TestMediaAreEncodedWhateverIsDecided(t *testing.T) {
	t.Parallel()
	for _, decision := range decisions {
		t.Run(decision, func(t *testing.T) {
			t.Parallel()
			x := startStage(t, "nixl", "  decision: {mode: "+decision+"}\n")
			for i := range 3 {
				body := chatOf(imageOfACat+","+strings.Replace(imageOfADog, "dog", fmt.Sprint("dog", i), 1), i%2 == 0)
				status, h, got := do(t, http.MethodPost, x.gateway.client+"/v1/chat/completions", body)
				require.Equal(t, http.StatusOK, status, got)
				assert.Equal(t, "disaggregated", h.Get("X-PD-Mode"))
				_, _, want := do(t, http.MethodPost, x.alone.URL()+"/v1/chat/completions", body)
				assert.Equal(t, texts(t, want), texts(t, got))
			}
			assert.EqualValues(t, 6, x.e.Stats().MediaEncoded)
			assert.Zero(t, x.p.Stats().MediaComputed+x.d.Stats().MediaComputed)
			if decision != "predicted" {
				status, h, got := x.gateway.complete(`{"model":"tiny","prompt":"words","max_tokens":2}`)
				require.Equal(t, http.StatusOK, status, got)
				assert.Equal(t, "aggregated", h.Get("X-PD-Mode"))
			}
		})
	}
}
