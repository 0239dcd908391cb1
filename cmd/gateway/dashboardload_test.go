// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"html"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// checkDrawing draws the dashboard from what a Prometheus has. No panel is left out.
func checkDrawing(t *testing.T, w watcher, from time.Time) {
	t.Helper()
	to := time.Now()
	page, err := drawDashboard(from, to, "4s", func(expr string) ([]series, error) { return w.over(expr, from, to) })
	require.NoError(t, err)
	for _, row := range dashboard {
		assert.Contains(t, string(page), ">"+html.EscapeString(row.title)+"</h2>")
		for _, p := range row.panels {
			assert.Contains(t, string(page), `class="title" x="14" y="20">`+html.EscapeString(p.title)+"</text>")
		}
	}
	assert.Greater(t, strings.Count(string(page), ` d="M`), 20, "curves")
	assert.NotContains(t, string(page), "NaN")
}

// The picture in docs/runbook.md: the dashboard's file, drawn with the series of a minute and a half in which much
// happens. TestAlertsAndTheDashboardOfARealPrometheus draws the same page in every run, with less to see.
func TestTheDashboardsPicture(t *testing.T) {
	if os.Getenv("PDKIT_UPDATE") == "" {
		t.Skip("PDKIT_UPDATE=1 draws docs/dashboard.png, in two minutes")
	}
	yaml, happen := eventfulFleet(t)
	g := start(t, gatewayYAML("")+yaml, "-inspect", "1s", "-synthetic-probe", "1s")
	w := watchedBy(t, g.admin, "1s")
	began := time.Now()
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer func() { stop(); clients.Wait() }()
	const length = 105
	for i, next := 0, began; time.Since(began) < length*time.Second; i++ {
		at := time.Since(began).Seconds()
		happen(at)
		clients.Go(func() { liveRequest(ctx, g, variedBody(i)) })
		rate := 9 + 5*math.Sin(at/8) // requests a second
		if at > 64 && at < 70 {
			rate = 44
		}
		next = next.Add(time.Duration(float64(time.Second) / rate))
		time.Sleep(time.Until(next))
	}
	to := time.Now()
	from := to.Add(-90 * time.Second)
	page, err := drawDashboard(from, to, "10s", func(expr string) ([]series, error) { return w.over(expr, from, to) })
	require.NoError(t, err)
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(page) }))
	t.Cleanup(site.Close)
	t.Cleanup(site.CloseClientConnections)
	b := openBrowser(t, site.URL, 1280, 1200, false, false)
	b.until(`document.querySelectorAll("section").length > 20`)
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": 1280, "deviceScaleFactor": 1, "mobile": false,
		"height": eval[int](b, `document.documentElement.scrollHeight`)}, nil)
	assert.Equal(t, 1280, eval[int](b, `document.documentElement.scrollWidth`), "it scrolls sideways")
	assert.Empty(t, eval[[]string](b, `[...document.querySelectorAll("p")].filter((p) => p.scrollHeight > p.clientHeight
		|| p.scrollWidth > p.clientWidth).map((p) => p.innerText)`), "legends that do not fit")
	assert.Empty(t, eval[[]string](b, `[...document.querySelectorAll("svg")].flatMap((s) =>
		[...s.querySelectorAll("text")].filter((e) => {
		const a = e.getBoundingClientRect(), b = s.getBoundingClientRect();
		return a.left < b.left + 4 || a.right > b.right - 4; }).map((e) => e.textContent))`), "texts that do not fit")
	require.NoError(t, os.WriteFile("../../docs/dashboard.png", b.picture(), 0o600))
}

// variedBody is the i-th request: two of three are streams, and some are such that no flow takes them.
func variedBody(i int) string {
	model, stream := "tiny", `,"stream":true,"stream_options":{"include_usage":true}`
	if i%3 == 0 {
		stream = ""
	}
	if i%40 == 7 {
		model = "huge"
	}
	if i%90 == 50 {
		return `{"model":"tiny","prompt":`
	}
	return fmt.Sprintf(`{"model":%q,"prompt":"%d %s","max_tokens":%d,"temperature":0%s}`, model, i,
		strings.Repeat("some words ", 8+7*i%40), 8+5*i%32, stream)
}

// eventfulFleet is a model of two prefill and two decode engines, and what happens to them in the course of the
// seconds.
func eventfulFleet(t *testing.T) (yaml string, happen func(at float64)) {
	t.Helper()
	var p, d [2]*enginesim.Engine
	for i := range p {
		p[i], d[i] = simPair(t, enginesim.Config{PrefillRate: 2500, Blocks: 160},
			enginesim.Config{ITL: time.Duration(14+4*i) * time.Millisecond, Blocks: 160, MaxRunning: 10})
	}
	yaml = simYAML("  rescue: {mode: on}\n  admission: {mode: fixed, inFlightPerPrefill: 2, inFlightPerDecode: 32, "+
		"queue: 8, queueTimeout: 1s}\n", p[0], d[0], p[1], d[1])
	reset := enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 4}
	troubles := []struct {
		from, to, every float64
		engine          *enginesim.Engine
		fault           enginesim.Fault
	}{
		{28, 40, 1.5, p[1], enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Leg: enginesim.LegPrefill}},
		{44, 56, 1.5, d[1], reset},
		{50, 60, 1.5, d[0], enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400, Leg: enginesim.LegDecode}},
		{80, 90, 20, p[0], enginesim.Fault{Kind: enginesim.FaultRefuse}},
	}
	return yaml, func(at float64) {
		for i := range troubles {
			if x := &troubles[i]; at > x.from && at < x.to {
				x.engine.Inject(x.fault)
				x.from += x.every
			}
		}
		if at > 90 {
			p[0].ClearFaults()
		}
	}
}
