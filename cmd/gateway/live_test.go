// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/attest"
)

// liveState is what live.json says.
type liveState struct {
	Models []struct {
		Model     string
		Ready     bool
		Phases    map[string]int
		Totals    liveTotals
		Minute    liveSpan
		Hour      liveSpan
		Past      livePast
		Endpoints []struct {
			ID      string
			Healthy bool

			IllSince *time.Time
			Load     int
			Recent   *liveRecent
			Engine   *engineLoad
			Decode   *occupancy
			State    string
			Left     float64
		}
		Pairs      []livePair
		OtherPairs *otherPairs
		Admission  *liveAdmission
		KV         *liveKV
	}
	Requests []timeline
}

func (p *program) live() (s liveState, body string) {
	p.t.Helper()
	status, h, body := do(p.t, http.MethodGet, p.admin+"/debug/live/live.json", "")
	require.Equal(p.t, http.StatusOK, status)
	require.Equal(p.t, "no-store", h.Get("Cache-Control"))
	require.NoError(p.t, json.Unmarshal([]byte(body), &s))
	return s, body
}

func TestTheLiveViewHasEachRequestsTimeline(t *testing.T) {
	g, _, d := startSim(t, "", "-inspect", "50ms")
	status, _, body := g.complete(`{"model":"tiny","prompt":"my secret","max_tokens":3}`, "X-Request-Id", "first")
	require.Equal(t, http.StatusOK, status, body)
	d.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400, Leg: enginesim.LegDecode, Count: 1})
	status, _, _ = g.complete(`{"model":"tiny","prompt":"my secret","max_tokens":3}`, "X-Request-Id", "second")
	require.Equal(t, http.StatusBadRequest, status)
	d.Inject(enginesim.Fault{Kind: enginesim.FaultStallStream, Leg: enginesim.LegDecode, AfterChunks: 1, Count: 1})
	s := g.stream("/v1/completions", `{"model":"tiny","prompt":"my secret","max_tokens":9,"stream":true}`)
	defer s.resp.Body.Close()
	var state liveState
	eventually(t, func() bool {
		state, body = g.live()
		m := state.Models[0]
		return len(state.Requests) == 3 && state.Requests[0].Phase == "stream" && m.Endpoints[1].Engine != nil &&
			m.Phases["stream"] == 1 && m.Totals.Served == 1 && len(m.Totals.Errors) == 1 &&
			len(m.Pairs) == 1 && m.Pairs[0].Served+m.Pairs[0].Failed == 2
	})
	assert.NotContains(t, body, "secret")
	if os.Getenv("PDKIT_UPDATE") != "" { // what pdctl watch is tested with
		require.NoError(t, os.WriteFile("../pdctl/testdata/live.json", []byte(body), 0o600))
	}
	running, failed, served := state.Requests[0], state.Requests[1], state.Requests[2]
	assert.True(t, running.Running)
	assert.Equal(t, "stream", running.Phase)
	assert.NotEmpty(t, running.Session)
	assert.Equal(t, "second", failed.RequestID)
	assert.Equal(t, "decode_rejected", failed.Error)
	assert.Equal(t, "final", failed.Retry)
	assert.Equal(t, "first", served.RequestID)
	assert.Equal(t, "disaggregated", served.Mode)
	require.NotNil(t, served.FirstToken)
	assert.LessOrEqual(t, *served.PrefillStart, *served.PrefillEnd)
	assert.LessOrEqual(t, *served.PrefillEnd, *served.DecodeStart)
	assert.LessOrEqual(t, *served.DecodeStart, *served.FirstToken)
	assert.LessOrEqual(t, *served.FirstToken, served.End)
	assert.EqualValues(t, 3, served.Output)
	m := state.Models[0]
	assert.Equal(t, 1, m.Phases["stream"])
	assert.Equal(t, liveTotals{Served: 1, Output: 3, Errors: map[string]int64{"decode_rejected": 1}}, m.Totals)
	assert.Equal(t, 1, m.Endpoints[1].Load)
	assert.Nil(t, m.Admission, "it is off")
	require.NotNil(t, running.DecodeStart, "the legs of one in flight are known, too")
	assert.LessOrEqual(t, *running.PrefillEnd, *running.DecodeStart)
	assert.Equal(t, "decode", failed.Leg)
	assert.Equal(t, 400, failed.Status)
	require.Len(t, m.Pairs, 1)
	pair := m.Pairs[0]
	assert.Equal(t, served.Prefill+served.Decode, pair.Prefill+pair.Decode)
	assert.EqualValues(t, 1, pair.Served)
	assert.EqualValues(t, 1, pair.Failed)
	assert.NotNil(t, pair.Handoff)
	assert.Nil(t, pair.Transfer, "no stream has ended")
	assert.Zero(t, pair.Reused, "nixl's responses do not tell what decode took over")
	assert.Nil(t, m.OtherPairs)
}

// The tokens that decode took over are those of its responses, as in the metrics, and what engines count besides.
func TestTheLiveViewHasTheKVThatMoved(t *testing.T) {
	x := (&protocol{connector: "sharedstorage", prepare: sharedFolder(nil)}).start(t)
	status, _, body := x.gateway.complete(fmt.Sprintf(
		`{"model":"tiny","prompt":"%s","max_tokens":2}`, strings.Repeat("some words ", 40)))
	require.Equal(t, http.StatusOK, status, body)
	var s liveState
	eventually(t, func() bool { // a page is not read at one moment
		s, _ = x.gateway.live()
		return s.Models[0].Totals.Served == 1 && len(s.Models[0].Pairs) == 1 && len(s.Requests) == 1 &&
			!s.Requests[0].Running
	})
	m := s.Models[0]
	metrics := x.gateway.page("/metrics")
	assert.Positive(t, m.Totals.Reused)
	assert.Regexp(t, fmt.Sprintf(`(?m)^pd_kv_tokens_total\{.*\} %d$`, m.Totals.Reused), metrics)
	assert.Equal(t, m.Totals.Reused, m.Pairs[0].Reused)
	assert.Equal(t, m.Totals.Reused, s.Requests[0].Reused)
	assert.Nil(t, m.KV, "engines are not asked without -inspect")

	g, _, _ := startSim(t, "", "-inspect", "50ms")
	eventually(t, func() bool {
		s, _ = g.live() // what was counted before is not the gateway's to show
		return s.Models[0].Endpoints[1].Engine != nil
	})
	status, _, body = g.complete(fmt.Sprintf(
		`{"model":"tiny","prompt":"%s","max_tokens":2}`, strings.Repeat("some words ", 40)))
	require.Equal(t, http.StatusOK, status, body)
	require.EventuallyWithT(t, func(c *assert.CollectT) { // the engine may be asked while the page is made
		s, _ = g.live()
		assert.Positive(c, s.Models[0].KV.Taken)
		assert.Positive(c, s.Models[0].KV.Bytes)
		assert.InDelta(c, s.Models[0].KV.Taken, s.Models[0].Endpoints[1].Engine.Taken, .1)
		assert.InDelta(c, s.Models[0].KV.Bytes, s.Models[0].Endpoints[1].Engine.Bytes, .1)
	}, 20*time.Second, time.Millisecond)
	assert.Zero(t, s.Models[0].Totals.Reused, "nixl's responses do not tell it")
}

// An engine that cannot be reached has a cooldown; what corrupts KV is in quarantine, which hides a cooldown.
func TestTheLiveViewHasCooldownsAndQuarantine(t *testing.T) {
	g, _, d := startSim(t, "")
	require.NoError(t, d.Close())
	var s liveState
	eventually(t, func() bool { // a cooldown is short, and a slow look finds it ended
		status, _, _ := g.complete(`{"model":"tiny","prompt":"a b c d"}`)
		s, _ = g.live()
		return assert.GreaterOrEqual(t, status, 500) && s.Models[0].Endpoints[1].State == "cooldown"
	})
	e := s.Models[0].Endpoints[1]
	assert.Positive(t, e.Left)
	assert.Empty(t, s.Models[0].Endpoints[0].State)

	pairs := map[pairKey]livePair{{"p", "d"}: {State: "cooldown", Left: 1}}
	engines := map[string]livePair{"d2": {State: "cooldown", Left: 1}}
	for _, suspect := range []attest.Suspect{{Prefill: "p", Decode: "d"}, {Prefill: "p2"}, {Decode: "d2"}} {
		addSuspect(pairs, engines, suspect)
	}
	assert.Equal(t, map[pairKey]livePair{{"p", "d"}: {Prefill: "p", Decode: "d", State: "quarantine"}}, pairs)
	assert.Equal(t, map[string]livePair{"p2": {Prefill: "p2", State: "quarantine"},
		"d2": {Decode: "d2", State: "quarantine"}}, engines)
}

// queueing starts a gateway whose prefill engine has one request at a time, at so many tokens a second, and one waits.
func queueing(t *testing.T, rate float64) *program {
	t.Helper()
	p, d := simPair(t, enginesim.Config{PrefillRate: rate}, enginesim.Config{})
	return start(t, gatewayYAML("")+
		simYAML("  admission: {mode: fixed, inFlightPerPrefill: 1, queue: 1, queueTimeout: 30s}\n", p, d))
}

// A request that has to wait for an engine with room shows how long it did, and one that is refused shows that.
func TestTheLiveViewHasTheQueue(t *testing.T) {
	t.Parallel()
	g := queueing(t, 100)
	var clients sync.WaitGroup
	ask := func(id string, words, want int) {
		status, _, body := g.complete(fmt.Sprintf(
			`{"model":"tiny","prompt":"%s","max_tokens":1}`, strings.Repeat("word ", words)), "X-Request-Id", id)
		assert.Equal(t, want, status, body)
	}
	clients.Go(func() { ask("first", 200, http.StatusOK) })
	eventually(t, func() bool { s, _ := g.live(); return s.Models[0].Phases["prefill"] == 1 })
	clients.Go(func() { ask("second", 1, http.StatusOK) })
	var s liveState
	var a *liveAdmission
	eventually(t, func() bool { // a page is not read at one moment: a request may be in a part of it only
		s, _ = g.live()
		a = s.Models[0].Admission
		return a != nil && a.Queued == 1 && s.Models[0].Phases["pick"] == 1 && len(s.Requests) == 2
	})
	assert.Equal(t, occupancy{InFlight: 1, Limit: 1}, a.Prefill)
	assert.Equal(t, "pick", s.Requests[1].Phase)
	assert.Nil(t, s.Requests[1].Picked, "it waits")
	ask("third", 1, http.StatusServiceUnavailable)
	clients.Wait()
	eventually(t, func() bool {
		s, _ = g.live()
		return len(s.Requests) == 3 && !slices.ContainsFunc(s.Requests, func(r timeline) bool { return r.Running })
	})
	assert.EqualValues(t, 1, s.Models[0].Admission.Refused["queue_full"])
	for _, r := range s.Requests {
		switch r.RequestID {
		case "first":
			assert.Less(t, *r.Picked, *r.PrefillEnd/2)
		case "second":
			assert.Greater(t, *r.Picked, 10., "it waited for the first one's prefill")
			assert.LessOrEqual(t, *r.Picked, *r.PrefillStart)
		case "third":
			assert.Equal(t, "overloaded", r.Error)
			assert.Nil(t, r.PrefillStart)
		}
	}
}

// The page needs nothing from elsewhere, and may load nothing.
func TestTheLivePageKeepsToItself(t *testing.T) {
	g, _, _ := startHTTP(t, "", "")
	for path, kind := range map[string]string{"": "text/html; charset=utf-8", "live.css": "text/css; charset=utf-8",
		"live.js": "text/javascript; charset=utf-8"} {
		status, h, body := do(t, http.MethodGet, g.admin+"/debug/live/"+path, "")
		require.Equal(t, http.StatusOK, status, path)
		assert.Equal(t, kind, h.Get("Content-Type"))
		assert.Contains(t, h.Get("Content-Security-Policy"), "default-src 'none'; script-src 'self'; style-src 'self';")
		assert.NotContains(t, h.Get("Content-Security-Policy"), "unsafe")
		assert.NotRegexp(t, `https?://|@import|(?:inner|outer)HTML|insertAdjacentHTML|setHTML|srcdoc|`+
			`createContextualFragment|DOMParser|document\.write|eval\(|new Function|javascript:`, body)
		assert.Equal(t, http.StatusForbidden, statusFor(t, "rebound.example:9000", g.admin+"/debug/live/"+path))
	}
	for _, path := range []string{"live.go", "../admin", "index.html", "live.json/x"} {
		status, _, _ := do(t, http.MethodGet, g.admin+"/debug/live/"+path, "")
		assert.Equal(t, http.StatusNotFound, status, path)
	}
}
