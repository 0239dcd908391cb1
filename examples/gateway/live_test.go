// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

// liveState is what live.json says.
type liveState struct {
	Models []struct {
		Model     string
		Ready     bool
		Phases    map[string]int
		Totals    liveTotals
		Endpoints []struct {
			ID     string
			Load   int
			Engine *engineLoad
		}
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
	p, d := startPair(t)
	g := start(t, gatewayYAML("")+nixlYAML(p, d), "-inspect", "50ms")
	status, _, body := do(t, http.MethodPost, g.client+"/v1/completions",
		`{"model":"tiny","prompt":"my secret","max_tokens":3}`, "X-Request-Id", "first")
	require.Equal(t, http.StatusOK, status, body)
	d.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400, Leg: enginesim.LegDecode, Count: 1})
	status, _, _ = do(t, http.MethodPost, g.client+"/v1/completions",
		`{"model":"tiny","prompt":"my secret","max_tokens":3}`, "X-Request-Id", "second")
	require.Equal(t, http.StatusBadRequest, status)
	d.Inject(enginesim.Fault{Kind: enginesim.FaultStallStream, Leg: enginesim.LegDecode, AfterChunks: 1, Count: 1})
	s := openStreamOf(t, g, `{"model":"tiny","prompt":"my secret","max_tokens":9,"stream":true}`)
	defer s.resp.Body.Close()
	var state liveState
	require.Eventually(t, func() bool {
		state, body = g.live()
		return len(state.Requests) == 3 && state.Models[0].Endpoints[1].Engine != nil
	}, 5*time.Second, 10*time.Millisecond)
	assert.NotContains(t, body, "secret")
	if os.Getenv("PDKIT_UPDATE") != "" { // what pdctl watch is tested with
		require.NoError(t, os.WriteFile("../pdctl/testdata/live.json", []byte(body), 0o600))
	}
	running, failed, served := state.Requests[0], state.Requests[1], state.Requests[2]
	assert.True(t, running.Running)
	assert.Equal(t, "stream", running.Phase)
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
}

// The page needs nothing from elsewhere, and may load nothing.
func TestTheLivePageKeepsToItself(t *testing.T) {
	p, d := newEngine(t), newEngine(t)
	g := start(t, gatewayYAML("")+pairYAML("m", p, d, ""))
	for path, kind := range map[string]string{"": "text/html; charset=utf-8", "live.css": "text/css; charset=utf-8",
		"live.js": "text/javascript; charset=utf-8"} {
		status, h, body := do(t, http.MethodGet, g.admin+"/debug/live/"+path, "")
		require.Equal(t, http.StatusOK, status, path)
		assert.Equal(t, kind, h.Get("Content-Type"))
		assert.Contains(t, h.Get("Content-Security-Policy"), "default-src 'none'; script-src 'self'; style-src 'self';")
		assert.NotContains(t, h.Get("Content-Security-Policy"), "unsafe")
		assert.NotRegexp(t, `https?://|@import|innerHTML|eval\(`, body)
		assert.Equal(t, http.StatusForbidden, statusFor(t, "rebound.example:9000", g.admin+"/debug/live/"+path))
	}
	for _, path := range []string{"live.go", "../admin", "index.html", "live.json/x"} {
		status, _, _ := do(t, http.MethodGet, g.admin+"/debug/live/"+path, "")
		assert.Equal(t, http.StatusNotFound, status, path)
	}
}
