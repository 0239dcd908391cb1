// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim"
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

// What is slow, hangs, has another name and is remembered, at once: comments keep clients while prefill is slow, one
// of four pairs hangs, clients know the model by another name, and ask for the responses that they stored.
// No client gets a wrong text, another's response or the engines' name of the model, and nothing is left behind.
// -together 10m plays it for longer.
func TestAllTogether(t *testing.T) {
	t.Parallel()
	const stored = "/v1/responses"
	c := enginesim.Config{Model: "served", KeepResponses: true, KeepRequests: -1, Lease: 3 * time.Second}
	alone := c
	alone.Connector = "none"
	lone, err := enginesim.Start(alone)
	require.NoError(t, err)
	t.Cleanup(func() { _ = lone.Close() })
	p1, d1 := simPair(t, c, c)
	p2, d2 := simPair(t, c, c)
	var entries []string
	for i, e := range []*enginesim.Engine{p1, p2, d1, d2} {
		entries = append(entries, entry(e.URL(), []string{"prefill", "decode"}[i/2], nil))
	}
	g := start(t, gatewayYAML("")+serverYAML("public", "  modelNames: {public: served}\n  keepAlive: {after: 100ms}\n"+
		"  kvConnector: {type: nixl, timeouts: {transfer: 700ms, decode: 20s}, retry: {budget: 1}}\n", entries...))

	end := time.Now().Add(*together)
	var right, failed, kept atomic.Int64
	judge := func(a, want asked, what string) bool {
		for _, m := range a.models {
			assert.Equal(t, "public", m, what)
		}
		if a.kept {
			kept.Add(1)
		}
		if a.status != http.StatusOK || !a.whole {
			assert.NotEqual(t, http.StatusNotFound, a.status, what)
			failed.Add(1)
			return false
		}
		right.Add(1)
		return assert.Equal(t, want.text, a.text, what)
	}
	var clients sync.WaitGroup
	for n := range 6 {
		clients.Go(func() {
			for i := 0; time.Now().Before(end); i++ {
				body := func(model, input string) string {
					return fmt.Sprintf(`{"model":%q,"max_output_tokens":6,"input":"client %d asks %d%s`, model, n, i,
						input)
				}
				if i%2 == 0 {
					text := fmt.Sprintf(`"stream":true,"max_tokens":6,"prompt":"client %d asks %d"}`, n, i)
					judge(asks(g.client, "/v1/completions", `{"model":"public",`+text),
						asks(lone.URL(), "/v1/completions", `{"model":"served",`+text), "a stream")
					continue
				}
				a, want := asks(g.client, stored, body("public", `"}`)), asks(lone.URL(), stored, body("served", `"}`))
				if !judge(a, want, "a response") {
					continue
				}
				judge(asks(g.client, stored+"/"+a.id, ""), want, "a stored response")
				next := func(id string) string { return fmt.Sprintf(` again","previous_response_id":%q}`, id) }
				judge(asks(g.client, stored, body("public", next(a.id))),
					asks(lone.URL(), stored, body("served", next(want.id))), "what follows a response")
			}
		})
	}
	d1.Inject(enginesim.Fault{Kind: enginesim.FaultHangTransfer, Leg: enginesim.LegDecode, Peer: p1.EngineID(),
		Count: -1})
	for time.Now().Before(end) {
		for _, p := range []*enginesim.Engine{p1, p2} {
			p.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Leg: enginesim.LegPrefill,
				Delay: 300 * time.Millisecond})
		}
		time.Sleep(200 * time.Millisecond)
	}
	clients.Wait()
	t.Logf("%d right, %d failed, %d kept alive", right.Load(), failed.Load(), kept.Load())
	assert.Greater(t, right.Load(), 10*failed.Load())
	assert.Positive(t, kept.Load())
	assert.Positive(t, sum(g.page("/metrics"), "pd_retries_total", `error_type="timeout"`), "the pair has hung")
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		page := g.page("/metrics")
		assert.Zero(c, sum(page, "pd_requests_active"))
		assert.Zero(c, sum(page, "pd_bytes_in_flight"))
		for _, e := range []*enginesim.Engine{p1, p2, d1, d2} {
			s := e.Stats()
			assert.Zero(c, s.Running+s.Waiting+s.PinnedBlocks)
		}
	}, 20*time.Second, 100*time.Millisecond)
	for _, e := range []*enginesim.Engine{p1, p2, d1, d2} {
		for _, err := range unwrapped(e.CheckKV()) {
			if fault, ok := errors.AsType[*enginesim.KVFault](err); ok {
				assert.Contains(t, []enginesim.KVFaultKind{enginesim.KVLeak, enginesim.KVNoTransfer}, fault.Kind,
					"a pair that hung leaves a lease, and a response that refers to another is computed where that is")
			}
		}
	}
}

func unwrapped(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return nil
}
