// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/decide/record"
)

var together = flag.Duration("together", 6*time.Second, "how long TestAllTogether sends requests")

// asked is what a client got for a request: the texts of its events or of its body, in order.
type asked struct {
	status      int
	text, id    string
	models      []string
	whole, kept bool // kept: a comment came before the first event
}

// asks sends a body to a path, or gets the path if the body is "".
func asks(url, path, body string) (a asked) {
	method := http.MethodPost
	if body == "" {
		method = http.MethodGet
	}
	r, err := http.NewRequest(method, url+path, strings.NewReader(body))
	if err != nil {
		return a
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return a
	}
	defer resp.Body.Close()
	all, err := io.ReadAll(resp.Body)
	a.status, a.whole = resp.StatusCode, err == nil
	events := [][]byte{all}
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		a.kept = bytes.HasPrefix(all, []byte(":"))
		a.whole = a.whole && bytes.Contains(all, []byte("data: [DONE]"))
		events = bytes.Split(all, []byte("data: "))[1:]
	}
	for _, e := range events {
		x := gjson.ParseBytes(bytes.TrimSpace(e))
		a.whole = a.whole && !(x.Get("error").IsObject() && a.status == http.StatusOK)
		a.text += x.Get("choices.0.text").String() + x.Get("output.#.content.0.text").String()
		if m := x.Get("model"); m.Exists() {
			a.models = append(a.models, m.String())
		}
		if id := x.Get("id").String(); id != "" {
			a.id = id
		}
	}
	return a
}

// form is what is decided in a run of TestAllTogether, and what happens besides. Each day has one of them, in turn, so
// that a test run takes no longer.
type form struct {
	name, spec string
	args       []string
	events     bool // engines publish their KV; some events are lost or late, and engines are killed
}

var (
	forms = []form{
		{name: "always"},
		{name: "predicted", spec: "  decision: {mode: predicted}\n", args: []string{"-pick", "prefix"}},
		{name: "events", spec: followed + "  decision: {mode: predicted}\n", args: []string{"-pick", "kv"},
			events: true},
	}
	formName = flag.String("together-form", forms[time.Now().YearDay()%len(forms)].name,
		"what TestAllTogether decides by: always, predicted or events; by default the day's")
)

// crowd is a run of TestAllTogether: engines of two pairs, and clients.
type crowd struct {
	form
	g                   *program
	lone                *enginesim.Engine
	engines             []*enginesim.Engine // two of prefill, then two of decode
	right, failed, kept atomic.Int64
}

func (c *crowd) start(t *testing.T) {
	t.Helper()
	cfg := enginesim.Config{Model: "served", KeepResponses: true, KeepRequests: -1, Lease: 3 * time.Second}
	alone := cfg
	alone.Connector = "none"
	var err error
	c.lone, err = enginesim.Start(alone)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.lone.Close() })
	if c.events {
		cfg.KVEvents = &enginesim.KVEvents{}
	}
	p1, d1 := simPair(t, cfg, cfg)
	p2, d2 := simPair(t, cfg, cfg)
	c.engines = []*enginesim.Engine{p1, p2, d1, d2}
	var entries []string
	for i, e := range c.engines {
		entries = append(entries, entry(e.URL(), []string{"prefill", "decode"}[i/2], nil))
	}
	c.g = start(t, gatewayYAML("")+serverYAML("public", "  modelNames: {public: served}\n  keepAlive: {after: 100ms}\n"+
		"  kvConnector: {type: nixl, timeouts: {transfer: 700ms, decode: 20s}, retry: {budget: 1}}\n"+c.spec,
		entries...), c.args...)
}

func (c *crowd) judge(t *testing.T, a, want asked, what string) bool {
	for _, m := range a.models {
		assert.Equal(t, "public", m, what)
	}
	if a.kept {
		c.kept.Add(1)
	}
	if a.status != http.StatusOK || !a.whole {
		if !c.events { // else the engine that had the response may have been killed
			assert.NotEqual(t, http.StatusNotFound, a.status, what)
		}
		c.failed.Add(1)
		return false
	}
	c.right.Add(1)
	return assert.Equal(t, want.text, a.text, what)
}

// asks sends a client's i-th request, and those that follow from it.
func (c *crowd) asks(t *testing.T, n, i int) {
	const stored = "/v1/responses"
	body := func(model, input string) string {
		return fmt.Sprintf(`{"model":%q,"max_output_tokens":6,"input":"client %d asks %d%s`, model, n, i, input)
	}
	if i%2 == 0 {
		text := turn(n, i)
		c.judge(t, asks(c.g.client, "/v1/completions", `{"model":"public",`+text),
			asks(c.lone.URL(), "/v1/completions", `{"model":"served",`+text), "a stream")
		return
	}
	a, want := asks(c.g.client, stored, body("public", `"}`)), asks(c.lone.URL(), stored, body("served", `"}`))
	if !c.judge(t, a, want, "a response") {
		return
	}
	c.judge(t, asks(c.g.client, stored+"/"+a.id, ""), want, "a stored response")
	next := func(id string) string { return fmt.Sprintf(` again","previous_response_id":%q}`, id) }
	c.judge(t, asks(c.g.client, stored, body("public", next(a.id))),
		asks(c.lone.URL(), stored, body("served", next(want.id))), "what follows a response")
}

// turn is the i-th request of a client's conversation, but for the model: each begins as those before it.
func turn(n, i int) string {
	return fmt.Sprintf(`"stream":true,"max_tokens":6,"prompt":"client %d %s asks %d"}`, n,
		strings.Repeat("goes on and ", i%40), i)
}

// happens plays what goes wrong, some of it in each step.
func (c *crowd) happens(t *testing.T, step int) {
	p2, d2 := c.engines[1], c.engines[3]
	for _, p := range c.engines[:2] {
		p.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Leg: enginesim.LegPrefill, Delay: 300 * time.Millisecond})
	}
	if !c.events {
		return
	}
	switch step % 10 {
	case 0, 5:
		d2.DropKVEvents(3)
		p2.DropKVEvents(1)
	case 2:
		p2.DropKVConnections()
		d2.DropKVConnections()
	case 3:
		d2.Freeze() // its events are late, too
	case 4:
		d2.Thaw()
	case 7:
		assert.NoError(t, p2.Restart())
	case 9:
		assert.NoError(t, d2.Restart())
	}
}

// What is slow, hangs, has another name and is remembered, at once: comments keep clients while prefill is slow, one
// of four pairs hangs, clients know the model by another name, and ask for the responses that they stored.
// No client gets a wrong text, another's response or the engines' name of the model, and nothing is left behind.
// -together 10m plays it for longer, -together-form events with decisions by events that get lost.
func TestAllTogether(t *testing.T) {
	t.Parallel()
	i := slices.IndexFunc(forms, func(f form) bool { return f.name == *formName })
	require.GreaterOrEqual(t, i, 0, "-together-form")
	c := &crowd{form: forms[i]}
	folder := t.TempDir()
	c.args = append(slices.Clone(c.args), "-record-decisions", folder)
	c.start(t)
	p1, d1 := c.engines[0], c.engines[2]
	end := time.Now().Add(*together)
	var clients sync.WaitGroup
	for n := range 6 {
		clients.Go(func() {
			for i := 0; time.Now().Before(end); i++ {
				c.asks(t, n, i)
			}
		})
	}
	d1.Inject(enginesim.Fault{Kind: enginesim.FaultHangTransfer, Leg: enginesim.LegDecode, Peer: p1.EngineID(),
		Count: -1})
	for step := 0; time.Now().Before(end); step++ {
		c.happens(t, step)
		time.Sleep(200 * time.Millisecond)
	}
	c.engines[3].Thaw()
	clients.Wait()
	t.Logf("%s: %d right, %d failed, %d kept alive", c.name, c.right.Load(), c.failed.Load(), c.kept.Load())
	assert.Greater(t, c.right.Load(), 10*c.failed.Load())
	assert.Positive(t, c.kept.Load())
	if c.spec == "" {
		assert.Positive(t, sum(c.g.page("/metrics"), "pd_retries_total", `error_type="timeout"`), "the pair has hung")
	}
	c.nothingIsLeft(t)
	if c.spec != "" {
		c.decidesOnTheTruth(t, folder)
	}
}

func (c *crowd) nothingIsLeft(t *testing.T) {
	require.EventuallyWithT(t, func(k *assert.CollectT) {
		page := c.g.page("/metrics")
		assert.Zero(k, sum(page, "pd_requests_active"))
		assert.Zero(k, sum(page, "pd_bytes_in_flight"))
		for _, e := range c.engines {
			s := e.Stats()
			assert.Zero(k, s.Running+s.Waiting+s.PinnedBlocks)
		}
	}, 20*time.Second, 100*time.Millisecond)
	for _, e := range c.engines {
		for _, err := range unwrapped(e.CheckKV()) {
			if fault, ok := errors.AsType[*enginesim.KVFault](err); ok {
				assert.Contains(t, []enginesim.KVFaultKind{enginesim.KVLeak, enginesim.KVNoTransfer}, fault.Kind,
					"a pair that hung leaves a lease; what is decided, or refers to another, is computed where that is")
			}
		}
	}
}

// decidesOnTheTruth asks for prompts of the run once more, one after another. Each is decided on engines that do
// nothing, and what is claimed to be exact is what the engines find.
func (c *crowd) decidesOnTheTruth(t *testing.T, folder string) {
	if c.events {
		c.g.exact(4)
	}
	const probes = 20
	for i := range probes {
		status, _, body := c.g.complete(`{"model":"public",` + turn(i%6, 2*i))
		require.Equal(t, http.StatusOK, status, body)
		time.Sleep(50 * time.Millisecond) // its KV is taken to move for as long as transfers took
	}
	c.g.signal()
	c.g.ended(exitOK)
	_, texts := recorded(t, folder)
	require.Len(t, texts, 1)
	report, err := record.Verify(strings.NewReader(texts[0]))
	require.NoError(t, err)
	assert.Nil(t, report.First)
	assert.Empty(t, report.Problems)
	_, entries, err := record.Read(strings.NewReader(texts[0]))
	require.NoError(t, err)
	var all []*record.Entry
	for e, err := range entries {
		require.NoError(t, err)
		all = append(all, e)
	}
	require.GreaterOrEqual(t, len(all), probes)
	exact, moving := 0, map[string]int{} // the least that an engine is taken to move: transfers were slow at times
	for _, e := range all[len(all)-probes:] {
		for role, list := range [2][]decide.Candidate{e.Input.Prefill, e.Input.Decode} {
			for i, x := range list {
				assert.Zero(t, x.Queue+x.QueueTokens+x.Running+x.Context+x.Coming+x.ComingContext, "%+v", x)
				if was, ok := moving[e.Engines[role][i]]; !ok || x.Moving < was {
					moving[e.Engines[role][i]] = x.Moving
				}
				computes := cmp.Or(e.Prefill, e.Decode)
				if x.CachedExact && e.Engines[role][i] == computes && (e.Prefill == "") == (role == 1) {
					exact++
					assert.InDelta(t, e.Result.Cached, x.Cached, 1+0.005*float64(x.Cached), "%s of %d tokens",
						e.Decision.Action, e.Input.Prompt) // figures are rounded where they are recorded
				}
			}
		}
	}
	for id, tokens := range moving {
		assert.Zero(t, tokens, id)
	}
	if c.events {
		assert.Greater(t, exact, probes/2)
	}
}

func unwrapped(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return nil
}
