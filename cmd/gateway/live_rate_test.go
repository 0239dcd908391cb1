// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

// What live.json may be, in bytes, with one model of 128 engines, at any rate: see TestTheLiveViewIsBounded, which
// measures 440 KB where each row is there and has each of its fields.
const liveBound = 470_000

// fleetOf128 is a model m of 64 prefill and 64 decode engines. Nothing is dialled.
func fleetOf128(t *testing.T) (*gateway, *model) {
	t.Helper()
	var yaml strings.Builder
	yaml.WriteString(gatewayYAML("") + "apiVersion: networking.matrixinfer.ai/v1alpha1\nkind: ModelServer\nspec:\n" +
		"  model: m\n  discovery:\n    static:\n      endpoints:\n")
	for i := range 64 {
		fmt.Fprintf(&yaml, "        - {url: 'http://10.0.0.%d:8000', role: prefill}\n"+
			"        - {url: 'http://10.0.1.%d:8000', role: decode}\n", i, i)
	}
	tel, err := newTelemetry(t.Context(), false, "")
	require.NoError(t, err)
	g, err := build(mustParse(t, yaml.String()), tel, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	m, err := g.buildModel(g.cfg.Load().models[0], nil)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var listing sync.WaitGroup
	listing.Go(func() { _ = m.set.Run(ctx) }) // and no health probes
	t.Cleanup(func() { stop(); listing.Wait(); m.release() })
	require.NoError(t, m.set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return len(s.Endpoints) == 128 }))
	g.list.Store(&[]*model{m})
	return g, m
}

// A thousand requests a second for five minutes, over the 4,096 pairs of 64 by 64 engines, with rare errors between
// frequent ones: the memory and live.json have their limits, and no kind of error is lost.
func TestTheLiveViewAtAThousandRequestsASecond(t *testing.T) {
	g, m := fleetOf128(t)
	begin := time.Now().Add(-5 * time.Minute)
	second := func(from int) {
		for i := range 1000 {
			code, n := pdflow.Code(""), from*1000+i
			switch {
			case n == 17:
				code = pdflow.CodeHandoffExpired // once, and never again
			case n%100 == 99:
				code = pdflow.CodeTimeout
			case n%3 == 2:
				code = pdflow.CodeOverloaded
			}
			m.recent.add(outcomeOf(n, code), time.Duration(i)*time.Microsecond,
				begin.Add(time.Duration(n)*time.Millisecond))
		}
	}
	memory := func() uint64 {
		runtime.GC()
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	for i := range 20 {
		second(i)
	}
	first := memory()
	for i := 20; i < 300; i++ {
		second(i)
	}
	assert.Less(t, int64(memory())-int64(first), int64(256<<10), "bytes more after five minutes than after 20 s")

	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.SetPathValue("file", strings.TrimPrefix(r.URL.Path, "/"))
		g.livePage(w, r)
	}))
	t.Cleanup(page.Close)
	t.Cleanup(page.CloseClientConnections)
	w := httptest.NewRecorder()
	g.liveData(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/debug/live/live.json", http.NoBody))
	t.Logf("live.json has %d bytes", w.Body.Len())
	assert.Less(t, w.Body.Len(), liveBound)
	var s liveState
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &s))
	assert.Equal(t, map[string]int64{"handoff_expired": 1, "timeout": 3000, "overloaded": 98_999},
		s.Models[0].Totals.Errors)
	assert.EqualValues(t, 300_000-1-3000-98_999, s.Models[0].Totals.Served)
	assert.Len(t, s.Models[0].Endpoints, 128)
	assert.Len(t, s.Models[0].Pairs, pairsShown)
	kinds := map[string]int{}
	for _, r := range s.Requests {
		kinds[r.Error]++
	}
	assert.Equal(t, map[string]int{"": recentServed, "timeout": recentFailed, "overloaded": recentFailed,
		"handoff_expired": 1}, kinds)

	b := openBrowser(t, page.URL+"/", 1280, 900, false, false)
	b.until(`document.querySelectorAll("table").length === 2`)
	assert.Equal(t, 2*12+2, eval[int](b, `document.querySelectorAll("tr").length`), "the busiest engines and pairs")
	eval[any](b, `document.querySelectorAll(".part > button").forEach((button) => button.click())`)
	assert.Equal(t, 128+pairsShown+2, eval[int](b, `document.querySelectorAll("tr").length`), "all that are listed")
	assert.Less(t, eval[int](b, `document.querySelectorAll("*").length`), 6000, "the page stays small")
	assert.Contains(t, eval[string](b, `document.body.innerText`), "Other pairs: ")
}

// The gateway as a process of its own, with engines in this one, as hard as the machine allows for PDKIT_LIVE_LOAD (a
// duration; 2 s otherwise): it says how many requests a second that were, how large live.json was, and how much memory
// the gateway had.
func TestTheLiveViewOfAProcessUnderLoad(t *testing.T) {
	length := 2 * time.Second
	if v := os.Getenv("PDKIT_LIVE_LOAD"); v != "" {
		var err error
		length, err = time.ParseDuration(v)
		require.NoError(t, err)
	}
	p, d := simPair(t, enginesim.Config{KeepRequests: -1}, enginesim.Config{KeepRequests: -1})
	g, cmd := startProcess(t, gatewayYAML("")+simYAML("", p, d), nil)
	eventually(t, func() bool {
		s, _ := g.live()
		return s.Models[0].Ready
	})

	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 32}}
	defer client.CloseIdleConnections()
	end := time.Now().Add(length)
	var sent, served, failed atomic.Int64
	working := func() bool { // until one has failed, too
		return time.Now().Before(end) || failed.Load() == 0 && time.Now().Before(end.Add(30*time.Second))
	}
	var clients sync.WaitGroup
	for range 16 {
		clients.Go(func() {
			for working() {
				n := sent.Add(1)
				body := `{"model":"tiny","prompt":"some words","max_tokens":1}`
				if n%200 == 0 {
					d.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400, Leg: enginesim.LegDecode,
						Count: 1})
				}
				resp, err := client.Post(g.client+"/v1/completions", "application/json", strings.NewReader(body))
				if err != nil {
					continue
				}
				if resp.StatusCode == http.StatusOK {
					served.Add(1)
				} else {
					failed.Add(1)
				}
				_ = resp.Body.Close()
			}
		})
	}
	var largest, asked int
	for working() {
		_, body := g.live()
		largest, asked = max(largest, len(body)), asked+1
		time.Sleep(250 * time.Millisecond)
	}
	clients.Wait()
	// An attempt that is retried is counted, too, and so is a request whose client lost its connection.
	var counted liveTotals
	var body string
	require.EventuallyWithT(t, func(c *assert.CollectT) { // an attempt ends a moment after its response
		var s liveState
		s, body = g.live()
		counted = s.Models[0].Totals
		assert.GreaterOrEqual(c, counted.Served, served.Load())
		assert.LessOrEqual(c, counted.Served, sent.Load())
		assert.GreaterOrEqual(c, counted.Served+errorsOf(counted), served.Load()+failed.Load())
	}, 20*time.Second, 50*time.Millisecond, "the totals count all")
	largest = max(largest, len(body))
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
	resident := "not known"
	if err == nil {
		for line := range strings.SplitSeq(string(status), "\n") {
			if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
				resident = strings.TrimSpace(rest)
			}
		}
	}
	t.Logf("%.0f requests a second for %v, %d failed; live.json up to %d bytes, asked for %d times; resident at most "+
		"%s", float64(sent.Load())/length.Seconds(), length, failed.Load(), largest, asked, resident)
	assert.Less(t, largest, liveBound)
	assert.Positive(t, failed.Load())
	assert.Contains(t, body, `"error":"`, "errors are among the timelines")
}

func errorsOf(totals liveTotals) (n int64) {
	for _, of := range totals.Errors {
		n += of
	}
	return n
}
