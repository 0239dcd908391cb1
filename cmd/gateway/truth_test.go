// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/enginesim"
)

// ledger is an engine's front, which counts the legs that reach the engine and how they end.
type ledger struct {
	*enginesim.Engine
	front *httptest.Server
	mu    sync.Mutex
	ended map[string]int // by status; "reset" before it, "cut" after it
}

func newLedger(t *testing.T, e *enginesim.Engine) *ledger {
	t.Helper()
	l := &ledger{Engine: e, ended: map[string]int{}}
	l.front = httptest.NewServer(l)
	t.Cleanup(l.front.Close)
	return l
}

func (l *ledger) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	out, err := http.NewRequestWithContext(r.Context(), r.Method, l.URL()+r.URL.Path, bytes.NewReader(body))
	if err != nil {
		return
	}
	out.Header = r.Header
	resp, err := http.DefaultClient.Do(out)
	how := "reset"
	if err == nil {
		defer resp.Body.Close()
		maps.Copy(w.Header(), resp.Header)
		w.WriteHeader(resp.StatusCode)
		how = strconv.Itoa(resp.StatusCode)
		if _, err = io.Copy(flushing{w}, resp.Body); err != nil && r.Context().Err() == nil {
			how = "cut"
		}
	}
	if r.Method == http.MethodPost {
		l.mu.Lock()
		l.ended[how]++
		l.mu.Unlock()
	}
	if err != nil {
		panic(http.ErrAbortHandler)
	}
}

// flushing sends on at once what is written.
type flushing struct{ http.ResponseWriter }

func (w flushing) Write(b []byte) (int, error) {
	n, err := w.ResponseWriter.Write(b)
	return n, errors.Join(err, http.NewResponseController(w.ResponseWriter).Flush())
}

// legsThat counts the legs of engines that ended in one of these ways, or in any.
func legsThat(engines []*ledger, how ...string) (n int) {
	for _, l := range engines {
		l.mu.Lock()
		for end, count := range l.ended {
			if len(how) == 0 || slices.Contains(how, end) {
				n += count
			}
		}
		l.mu.Unlock()
	}
	return n
}

// sum adds up the series of a metric that have all these labels; a label with "!" before it must not be there.
func sum(page, name string, labels ...string) (total int) {
	for line := range strings.Lines(page) {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || rest[0] != '{' && rest[0] != ' ' {
			continue
		}
		for _, l := range labels {
			not, without := strings.CutPrefix(l, "!")
			ok = ok && strings.Contains(rest, not) != without
		}
		if v, err := strconv.ParseFloat(strings.TrimSpace(rest[strings.LastIndex(rest, " "):]), 64); ok && err == nil {
			total += int(v)
		}
	}
	return total
}

// word is what clients saw.
type word struct {
	mu     sync.Mutex
	counts map[string]int
}

func (w *word) saw(what string, n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.counts[what] += n
}

var completionTokens = regexp.MustCompile(`"completion_tokens": ?(\d+)`)

// send sends a request and notes what its client sees of the response: whole, cut, left, or the class of its status.
func (w *word) send(g *program, path, body string, leaves bool) {
	ctx, leave := context.WithCancel(g.t.Context())
	defer leave()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, g.client+path, strings.NewReader(body))
	if err != nil {
		return
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		w.saw("no response", 1)
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		_, _ = io.Copy(io.Discard, resp.Body)
		w.saw(strconv.Itoa(resp.StatusCode), 1)
		return
	}
	stream := strings.Contains(body, `"stream":true`)
	first := make([]byte, 8)
	n, _ := io.ReadFull(resp.Body, first)
	if n > 0 && stream {
		w.saw("begun", 1)
	}
	if leaves {
		w.saw("left", 1)
		return
	}
	rest, err := io.ReadAll(resp.Body)
	if all := append(first[:n], rest...); err != nil || stream && !bytes.Contains(all, []byte("[DONE]")) {
		w.saw("cut", 1)
	} else if w.saw("whole", 1); completionTokens.Match(all) {
		tokens := completionTokens.FindAllSubmatch(all, -1)
		made, _ := strconv.Atoi(string(tokens[len(tokens)-1][1]))
		w.saw("tokens", made)
	}
}

// truthFleet is two prefill and three decode engines with faults of many kinds, each a number of times.
func truthFleet(t *testing.T) (p, d []*ledger) {
	t.Helper()
	c := enginesim.Config{KeepRequests: -1, Lease: time.Second}
	for i := range 3 {
		decode := c
		decode.ITL = 2 * time.Millisecond
		pe, de := simPair(t, c, decode)
		if d = append(d, newLedger(t, de)); i < 2 {
			p = append(p, newLedger(t, pe))
		}
	}
	fault := func(e *ledger, n int, f enginesim.Fault) {
		f.Leg, f.Count, f.Share = enginesim.LegDecode, n, .3
		if e == p[0] || e == p[1] {
			f.Leg = enginesim.LegPrefill
		}
		e.Inject(f)
	}
	fault(p[0], 9, enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500})
	fault(p[0], 5, enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400})
	fault(p[1], 6, enginesim.Fault{Kind: enginesim.FaultReset})
	fault(p[1], 3, enginesim.Fault{Kind: enginesim.FaultStatus, Status: 404, Body: `{"error":{"message":"The model ` +
		"`tiny`" + ` does not exist.","type":"NotFoundError","param":"model","code":404}}`})
	fault(d[0], 8, enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3})
	fault(d[1], 4, enginesim.Fault{Kind: enginesim.FaultStatus, Status: 503})
	fault(d[2], 6, enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500})
	return p, d
}

// What the gateway counts of requests, attempts, legs and failures is what clients and engines have counted, while
// engines fail in many ways, clients leave, and some write nonsense.
func TestTheMetricsAreTheTruth(t *testing.T) {
	t.Parallel()
	p, d := truthFleet(t)
	var endpoints []string
	for i, l := range append(p, d...) {
		endpoints = append(endpoints, entry(l.front.URL, []string{"prefill", "prefill", "decode"}[min(i, 2)], nil))
	}
	g := start(t, gatewayYAML("")+serverYAML("tiny", "  kvConnector: {type: nixl, retry: {maxAttempts: 3, budget: 1, "+
		"backoffBase: 1ms}}\n", endpoints...), "-inspect", "1s")
	eventually(t, func() bool { // what engines count from now on is the gateway's to show
		state, _ := g.live()
		for _, e := range state.Models[0].Endpoints {
			if e.Engine == nil {
				return false
			}
		}
		return true
	})
	g.page("/metrics")
	w := &word{counts: map[string]int{}}
	playsAll(t, g, w)

	requests := w.counts["whole"] + w.counts["cut"] + w.counts["left"] + w.counts["400"] + w.counts["502"] +
		w.counts["503"] + w.counts["500"] - w.counts["nonsense"]
	assert.Zero(t, w.counts["no response"])
	t.Log(w.counts)
	for _, l := range append(p, d...) {
		l.mu.Lock() // engines may still serve what clients have left
		t.Log(l.ended)
		l.mu.Unlock()
	}
	var page string
	assert.EventuallyWithT(t, func(c *assert.CollectT) { // leases end, and engines are asked
		page = g.page("/metrics")
		expired := int(p[0].Stats().Expired + p[1].Stats().Expired)
		assert.Zero(c, p[0].Stats().PinnedBlocks+p[1].Stats().PinnedBlocks)
		assert.Equal(c, expired, sum(page, "pd_engine_kv_expired_total"))
		assert.Zero(c, sum(page, "pd_requests_active"))
	}, 20*time.Second, 100*time.Millisecond)

	failed := func(metric string, codes ...string) (n int) {
		for _, code := range codes {
			n += sum(page, metric, `error_type="`+code+`"`)
		}
		return n
	}
	const requestsOf, attemptsOf, legsOf = "pd_request_duration_seconds_count", "pd_attempts_total",
		"pd_leg_duration_seconds_count"
	released := legsThat(d, "404")
	expired := int(p[0].Stats().Expired + p[1].Stats().Expired)
	for _, c := range []struct {
		what string
		want int // by clients and engines
		got  int
	}{
		{"requests", requests, sum(page, requestsOf)},
		{"requests that were served", w.counts["whole"], sum(page, requestsOf, "!error_type")},
		{"streams that clients saw cut", w.counts["cut"], failed(requestsOf, "stream_broken")},
		{"clients that left", w.counts["left"], failed(requestsOf, "client_gone")},
		{"requests that an engine refused", w.counts["400"] - w.counts["nonsense"],
			failed(requestsOf, "prefill_rejected", "decode_rejected")},
		{"requests that failed otherwise", w.counts["500"] + w.counts["502"] + w.counts["503"],
			failed(requestsOf, "prefill_failed", "decode_failed")},
		{"requests that no flow took", w.counts["nonsense"] + w.counts["404"], sum(page, "pd_requests_refused_total")},
		{"requests that PD cannot carry", w.counts["unsupported"], sum(page, "pd_unsupported_total")},
		{"streams with a first event", w.counts["begun"], sum(page, "pd_time_to_first_chunk_seconds_count")},
		{"tokens", w.counts["tokens"], sum(page, "pd_tokens_total", `pd_token_type="output"`)},
		{"prefill legs", legsThat(p), sum(page, legsOf, `pd_leg="prefill"`)},
		{"prefill legs that failed", legsThat(p, "500", "reset"), failed(legsOf, "prefill_failed")},
		{"prefill legs that were refused", legsThat(p, "400", "404"), failed(legsOf, "prefill_rejected")},
		{"decode legs", legsThat(d) - released, sum(page, legsOf, `pd_leg="decode"`)},
		{"decode legs that failed", legsThat(d, "500", "503"), failed(legsOf, "decode_failed")},
		{"decode legs that were refused", legsThat(d, "400"), failed(legsOf, "decode_rejected")},
		{"handoffs", legsThat(p, "200"), sum(page, "pd_handoff_age_seconds_count")},
		{"handoffs that were released", released, sum(page, "pd_handoffs_released_total")},
		{"handoffs that were left to their lease", expired, sum(page, "pd_attempts_expired_total")},
		{"attempts", legsThat(p) + w.counts["unsupported"], sum(page, attemptsOf)},
		{"attempts that failed at prefill", legsThat(p, "500", "reset"), failed(attemptsOf, "prefill_failed")},
		{"attempts that failed at decode", legsThat(d, "500", "503"), failed(attemptsOf, "decode_failed")},
		{"attempts that were retried", sum(page, attemptsOf) - requests, sum(page, "pd_retries_total")},
		{"attempts that were not", legsThat(p, "500", "reset", "400", "404") + legsThat(d, "500", "503", "400"),
			sum(page, "pd_retries_total") + sum(page, "pd_retries_skipped_total")},
		{"fallbacks", 0, sum(page, "pd_fallbacks_total")},
		{"orphans", 0, sum(page, "pd_orphans_total")},
	} {
		assert.Equal(t, c.want, c.got, c.what)
	}
	for what, n := range w.counts {
		assert.Positive(t, n, what)
	}
	if t.Failed() {
		t.Log(grepPD(page))
	}
}

// playsAll sends all kinds of requests, and waits until all have ended.
func playsAll(t *testing.T, g *program, w *word) {
	t.Helper()
	slots := make(chan struct{}, 12)
	var all sync.WaitGroup
	for i := range 400 {
		slots <- struct{}{}
		time.Sleep(10 * time.Millisecond) // cooldowns end meanwhile
		all.Go(func() {
			defer func() { <-slots }()
			members := map[string]any{"model": "tiny", "prompt": fmt.Sprintf("client %d of many", i), "max_tokens": 8}
			leaves := false
			switch {
			case i%40 == 5:
				w.saw("nonsense", 1)
				w.send(g, "/v1/completions", `{"model":`, false)
				return
			case i%40 == 6:
				members["model"] = "unknown"
			case i%40 == 7:
				members["n"] = 2
				w.saw("unsupported", 1)
			case i >= 390: // P makes one token and accepts it, D refuses it
				members["max_tokens"] = 1_000_000
			case i%3 > 0:
				members["stream"], members["stream_options"] = true, map[string]bool{"include_usage": true}
				if leaves = i%20 == 1; leaves {
					members["max_tokens"] = 2000
				}
			}
			body, err := json.Marshal(members)
			if assert.NoError(t, err) {
				w.send(g, "/v1/completions", string(body), leaves)
			}
		})
	}
	all.Wait()
}
