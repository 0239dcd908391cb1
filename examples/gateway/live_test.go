// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"image/png"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
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

// At a thousand requests a second the view keeps some of each second, and the totals count all.
func TestTheLiveViewSamples(t *testing.T) {
	r := newRecent()
	now := time.Unix(1000, 0)
	for i := range 5000 {
		o := &pdflow.Outcome{Session: &connector.Session{RequestID: strconv.Itoa(i)}}
		if i%2 == 1 {
			o.Err = &pdflow.Error{Code: pdflow.CodeTimeout}
		}
		r.add("m", o, now.Add(time.Duration(i)*time.Millisecond))
	}
	all, totals := r.list()
	assert.EqualValues(t, 2500, totals.Served)
	assert.EqualValues(t, 2500, totals.Errors["timeout"])
	failed := 0
	for _, x := range all {
		if x.Error != "" {
			failed++
		}
	}
	assert.Len(t, all, 5*2*livePerSecond)
	assert.Equal(t, 5*livePerSecond, failed)
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

// The page in a real browser, under load: wide, on a phone, and dark. PDKIT_UPDATE=1 writes the pictures of the docs.
func TestTheLiveViewInChromium(t *testing.T) {
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("examples/gateway/live/install.sh has not been run: ", err)
		}
		t.Skip("Chromium is not installed: run examples/gateway/live/install.sh")
	}
	g := start(t, gatewayYAML("")+liveFleet(t), "-inspect", "200ms")
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer func() { stop(); clients.Wait() }()
	for c := range 12 {
		clients.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				liveRequest(ctx, g, fmt.Sprintf(`{"model":"tiny","prompt":"%s","max_tokens":%d,"stream":true}`,
					strings.Repeat("some words ", 5+(7*c+11*i)%60), 10+(5*c+7*i)%50))
			}
		})
	}
	require.Eventually(t, func() bool {
		state, _ := g.live()
		return len(state.Requests) > 60 && len(state.Models[0].Totals.Errors) > 0
	}, 30*time.Second, 100*time.Millisecond)
	for name, c := range map[string]struct {
		size string
		more []string
	}{
		"live": {"1280,1400", nil},
		"live-dark": {"1280,1400", []string{"--enable-features=WebContentsForceDark:inversion_method/cielab_based",
			"--blink-settings=preferredColorScheme=0"}},
		"live-phone": {"500,1100", nil}, // the smallest window that Chromium opens
	} {
		file := filepath.Join(t.TempDir(), name+".png")
		limit, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(limit, chromium, append([]string{"--headless=new", "--no-sandbox",
			"--disable-gpu", "--hide-scrollbars", "--user-data-dir=" + t.TempDir(), "--window-size=" + c.size,
			"--virtual-time-budget=4000", "--screenshot=" + file, g.admin + "/debug/live/"}, c.more...)...)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		assert.NotContains(t, string(out), "CONSOLE", "the page's script complains")
		f, err := os.Open(file)
		require.NoError(t, err)
		defer f.Close()
		picture, err := png.Decode(f)
		require.NoError(t, err)
		colours := map[string]int{}
		for x := range picture.Bounds().Dx() {
			for y := range picture.Bounds().Dy() {
				r, g, b, _ := picture.At(x, y).RGBA()
				colours[fmt.Sprintf("%02x%02x%02x", r>>8, g>>8, b>>8)]++
			}
		}
		if name == "live" {
			for _, part := range []string{"4477aa", "3c9a6e"} { // some 160 pixels of each are the legend's
				assert.Greater(t, colours[part], 2000, "%s shows no part of a timeline in #%s", name, part)
			}
		}
		if os.Getenv("PDKIT_UPDATE") != "" {
			data, err := os.ReadFile(file)
			require.NoError(t, err)
			require.NoError(t, os.WriteFile("../../docs/"+name+".png", data, 0o600))
		}
	}
}

// liveFleet is a model with two prefill and three decode engines that take their time; one of these fails now and then.
func liveFleet(t *testing.T) string {
	t.Helper()
	yaml := ""
	for i := range 3 {
		p, d, err := enginesim.Pair(enginesim.Config{PrefillRate: 600},
			enginesim.Config{ITL: time.Duration(6+3*i) * time.Millisecond})
		require.NoError(t, err)
		t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
		if i == 0 {
			yaml = nixlYAML(p, d)
			continue
		}
		yaml = strings.TrimSuffix(yaml, "---\n") + fmt.Sprintf("        - {url: %q, role: decode, group: a}\n", d.URL())
		if i == 1 {
			yaml += fmt.Sprintf("        - {url: %q, role: prefill, group: a}\n", p.URL())
		} else {
			d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 8,
				Count: 6})
		}
	}
	return yaml + "---\n"
}

// liveRequest sends one request and reads its response, however it ends.
func liveRequest(ctx context.Context, g *program, body string) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, g.client+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
}
