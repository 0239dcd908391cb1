// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

const followed = "  kvEvents: {mode: ask, tokens: engines, tokensTimeout: 10s}\n"

// publishers are n pairs whose engines publish their events.
func publishers(t *testing.T, n int, change func(*enginesim.Config)) (engines []*enginesim.Engine) {
	t.Helper()
	for range n {
		c := enginesim.Config{KVEvents: &enginesim.KVEvents{}}
		if change != nil {
			change(&c)
		}
		p, d := simPair(t, c, c)
		engines = append(engines, p, d)
	}
	return engines
}

func (p *program) exact(n int) {
	p.t.Helper()
	words := make([]string, n)
	for i := range words {
		words[i] = "exact"
	}
	p.knowsKV(words...)
}

// posted counts the requests of a path that reached an engine.
func posted(e *enginesim.Engine, path string) (n int) {
	for _, r := range e.Requests() {
		if r.Path == path {
			n++
		}
	}
	return n
}

// ai-dynamo/dynamo#11723, llm-d/llm-d#1466: what decode holds decides, and is known by its events.
func TestTurnTwoStaysAtTheDecodeEngineThatHoldsTurnOne(t *testing.T) {
	t.Parallel()
	engines := publishers(t, 2, nil)
	g := start(t, gatewayYAML("")+simYAML(followed+"  decision: {mode: threshold, uncachedTokens: 100}\n", engines...),
		"-pick", "kv")
	g.exact(4)
	long := strings.Repeat("a long conversation ", 100)
	say := func(text string) string {
		status, header, body := g.complete(fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":4}`, text))
		require.Equal(t, http.StatusOK, status, body)
		return header.Get("X-PD-Mode")
	}
	assert.Equal(t, "disaggregated", say(long))
	eventually(t, func() bool { return say(long+" and more") == "aggregated" })
	assert.Positive(t, sum(g.page("/metrics"), "pd_decisions_total", `pd_reason="cached"`), grepPD(g.page("/metrics")))
}

// llm-d/llm-d-router#1861: /v1/messages and /v1/responses are tokenized by no engine; that must not harm chats.
func TestAnAPIThatEnginesDoNotRenderIsNoReasonToAskNoMore(t *testing.T) {
	t.Parallel()
	engines := publishers(t, 2, nil)
	g := start(t, gatewayYAML("")+simYAML(followed, engines...), "-pick", "kv")
	g.exact(4)
	for i := range 4 {
		status, _, body := do(t, "POST", g.client+"/v1/responses", fmt.Sprintf(`{"model":"tiny","input":"hi %d"}`, i))
		require.Equal(t, http.StatusOK, status, body)
	}
	for i := range 8 {
		status, _, body := do(t, "POST", g.client+"/v1/chat/completions", fmt.Sprintf(
			`{"model":"tiny","messages":[{"role":"user","content":"hi %d"}],"max_tokens":2}`, i))
		require.Equal(t, http.StatusOK, status, body)
	}
	n := 0
	for _, e := range engines {
		n += posted(e, "/v1/chat/completions/render")
	}
	assert.Equal(t, 8, n)
}

// An adapter that some engines lack: those are not asked for tokens, and the others still are.
func TestAnAdapterThatAnEngineLacksIsNoReasonToAskNoMore(t *testing.T) {
	t.Parallel()
	engines := publishers(t, 2, nil)
	engines[0].LoadAdapter("lora")
	engines[1].LoadAdapter("lora")
	g := start(t, gatewayYAML("")+simYAML(followed+"  adapters: auto\n", engines...), "-pick", "kv")
	g.exact(4)
	eventually(t, func() bool {
		status, _, _ := g.complete(`{"model":"lora","prompt":"hi","max_tokens":2}`)
		return status == http.StatusOK
	})
	for i := range 8 {
		status, _, body := g.complete(fmt.Sprintf(`{"model":"lora","prompt":"hi %d","max_tokens":2}`, i))
		require.Equal(t, http.StatusOK, status, body)
	}
	before := 0
	for _, e := range engines {
		before += posted(e, "/v1/completions/render")
	}
	for i := range 8 {
		status, _, body := g.complete(fmt.Sprintf(`{"model":"tiny","prompt":"ho %d","max_tokens":2}`, i))
		require.Equal(t, http.StatusOK, status, body)
	}
	after := 0
	for _, e := range engines {
		after += posted(e, "/v1/completions/render")
	}
	assert.Equal(t, 8, after-before)
}

// A dry run asks nobody twice, and leaves the pick to the events.
func TestADryRunByEventsLeavesThePickAlone(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"never", "threshold, uncachedTokens: 100", "predicted"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			engines := publishers(t, 3, nil)
			g := start(t, gatewayYAML("")+simYAML(followed+"  decision: {mode: "+mode+", dryRun: true}\n", engines...),
				"-pick", "kv")
			g.exact(6)
			long := strings.Repeat("a long conversation ", 60)
			say := func(text string) {
				status, h, body := g.complete(fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":2}`, text))
				require.Equal(t, http.StatusOK, status, body)
				assert.Equal(t, "disaggregated", h.Get("X-PD-Mode"))
			}
			seen, p := make([]int, 3), []*enginesim.Engine{engines[0], engines[2], engines[4]}
			say(long)
			home := gets(p, "/v1/completions", seen)
			batches := func() int { return sum(g.page("/metrics"), "pd_kv_events_batches_total") }
			eventually(t, func() bool { return batches() >= 2 }, "of P and of D")
			for turn := range 6 {
				say(fmt.Sprint(long, turn))
				assert.Equal(t, home, gets(p, "/v1/completions", seen))
			}
			page := g.page("/metrics")
			assert.Equal(t, 7, sum(page, "pd_decisions_total"), grepPD(page))
			assert.Equal(t, 7, sum(page, "pd_kv_events_prompts_total"), "each prompt is asked for once")
			assert.Equal(t, 7, sum(page, "pd_attempts_total", `pd_mode="disaggregated"`))
		})
	}
}

// llm-d/llm-d-router#2853: without a replay, too, an engine that has restarted holds nothing of before.
func TestARestartedEngineWithoutReplayHoldsNothing(t *testing.T) {
	t.Parallel()
	engines := publishers(t, 2, func(c *enginesim.Config) { c.KVEvents = &enginesim.KVEvents{Replay: "none"} })
	g := start(t, gatewayYAML("")+simYAML(followed+"  decision: {mode: threshold, uncachedTokens: 100}\n", engines...),
		"-pick", "kv")
	say := func(text string) string {
		status, header, body := g.complete(fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":4}`, text))
		require.Equal(t, http.StatusOK, status, body)
		return header.Get("X-PD-Mode")
	}
	held, n := "", 0
	eventually(t, func() bool { // the first events come when the subscription stands
		n++
		held = fmt.Sprint(n, strings.Repeat(" a long conversation", 100))
		say(held)
		time.Sleep(20 * time.Millisecond)
		return say(held+" and more") == "aggregated"
	}, "decode holds it")
	for _, e := range engines {
		require.NoError(t, e.Restart())
	}
	eventually(t, func() bool { return sum(g.page("/metrics"), "pd_kv_events_connections_lost_total") >= 4 })
	assert.Equal(t, "disaggregated", say(held+" and then"), "nobody holds it")
}
