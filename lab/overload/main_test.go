// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/admit"
)

// inBubble measures in the time of a synctest bubble, so the figures do not depend on the machine.
func inBubble(t *testing.T, by narrow, load float64, limits *admit.Options) *result {
	t.Helper()
	var res *result
	synctest.Test(t, func(t *testing.T) {
		var err error
		res, err = measure(t.Context(), run{by: by, capacity: 80, load: load, lasts: 30 * time.Second,
			decode: 200 * time.Millisecond, timeout: 2 * time.Second, limits: limits}, 1)
		require.NoError(t, err)
	})
	t.Logf("%s, load %.2f: %d offered, %d served, %d refused, %d failed, goodput %.1f/s, p99 %.3f s, first %.3f s, "+
		"refusals' p99 %.4f s, max %.4f", by, load, res.offered, res.served, res.refused, res.failed, res.goodput,
		quantile(res.took, .99), quantile(res.first, .99), quantile(res.refusing, .99), quantile(res.refusing, 1))
	return res
}

func TestOverloadCollapsesWithoutAdmissionAndDoesNotWithIt(t *testing.T) {
	without := inBubble(t, narrowPrefill, 210./80, nil)
	assert.Less(t, without.goodput, .4*80, "without admission each request runs into its timeout")

	for _, by := range []narrow{narrowPrefill, narrowPrompts, narrowDecode} {
		t.Run(string(by), func(t *testing.T) {
			usual := inBubble(t, by, .8, &admit.Options{Adaptive: true})
			assert.Zero(t, usual.refused+usual.failed, "a load that can be served is served")
			for _, load := range []float64{210. / 80, 3} {
				over := inBubble(t, by, load, &admit.Options{Adaptive: true})
				assert.Greater(t, over.goodput, .8*80)
				assert.Zero(t, over.failed)
				assert.Less(t, quantile(over.took, .99), 2*quantile(usual.took, .99))
				assert.Less(t, quantile(over.refusing, .99), .005)
			}
		})
	}
}

// The queue must not fill before its pace is known, whatever the engines' time for one prompt is: that made clients of
// little patience give up, and refused the others only because the queue was full.
func TestAnOverloadIsBoundedFromItsFirstSecond(t *testing.T) {
	for _, by := range []narrow{narrowPrefill, narrowPrompts, narrowBatch, narrowDecode} {
		t.Run(string(by), func(t *testing.T) {
			over := cold(t, by, 0)
			usual := quantile(inBubble(t, by, .5, &admit.Options{Adaptive: true}).took, .5)
			for i, s := range over.seconds[:10] {
				if i > 0 {
					assert.Greater(t, s.served, 70, "second %d", i)
				}
				assert.Less(t, quantile(s.took, .95), usual+.7, "second %d", i)
			}
			assert.Less(t, quantile(over.took, .95), usual+.5)
		})
	}
}

// An engine that becomes slower is not taken for one that has too much to do: its limit would shrink until it idles.
func TestASlowerEngineKeepsItsGoodput(t *testing.T) {
	for _, by := range []narrow{narrowPrefill, narrowBatch} {
		over := cold(t, by, 4)
		served := 0
		for _, s := range over.seconds[6:10] {
			served += s.served
		}
		assert.Greater(t, served, 4*80/4*8/10, "%s: of what it can serve", by)
	}
}

// cold offers three times the capacity to engines of which nothing is known yet.
func cold(t *testing.T, by narrow, slower int64) (res *result) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var err error
		r := coldStart(by)
		r.lasts, r.slower = 10*time.Second, slower
		res, err = measure(t.Context(), r, 1)
		require.NoError(t, err)
	})
	assert.Zero(t, res.gone+int(res.full)+res.failed)
	return res
}

// Over HTTP and in real time the same happens. The bounds are wide, since other programs run beside this one: latencies
// may be three times those of the page.
func TestAnOverloadIsBoundedOverHTTP(t *testing.T) {
	page, err := os.ReadFile("../../docs/reliability/overload.md")
	require.NoError(t, err)
	row := regexp.MustCompile(`\| batch \| over HTTP \| (\d+), .*? \| (\d+), `).FindSubmatch(page)
	require.NotNil(t, row)
	r := coldStart(narrowBatch)
	r.lasts, r.http = 4*time.Second, true
	res, err := measure(t.Context(), r, 1)
	require.NoError(t, err)
	t.Log(coldRow(r, res))
	for i, s := range res.seconds[:4] {
		told, err := strconv.Atoi(string(row[min(i, 1)+1]))
		require.NoError(t, err)
		assert.Less(t, 1000*quantile(s.took, .5), 3*float64(told), "second %d", i)
	}
	assert.Zero(t, int(res.full)+res.failed)
	assert.Less(t, res.gone, res.offered/20)
	assert.Greater(t, res.served, 80*2)
	assert.Greater(t, res.refused, res.offered/4)
}

func TestTheReportHasATableAndAPlot(t *testing.T) {
	r := run{by: narrowPrefill, capacity: 80, lasts: 4 * time.Second, decode: 200 * time.Millisecond,
		timeout: 2 * time.Second, load: 2}
	p := point{load: r.load}
	synctest.Test(t, func(t *testing.T) {
		var err error
		p, err = both(t.Context(), r, 2)
		require.NoError(t, err)
	})
	assert.Regexp(t, `\n\| 2\.0 \| \d+\.\d/s \| \d+ \| \d+\.\d % \| \d\d\.\d/s \|`, page(r, []point{p}, nil, "", ""))
	file := filepath.Join(t.TempDir(), "overload.png")
	require.NoError(t, drawing(file, r, []point{p}))
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, "image/png", http.DetectContentType(data))
	require.Error(t, command(t.Context(), []string{"-lasts", "0s"}, io.Discard, io.Discard))
}

// A refusal is quick in real time, too: nothing is waited for.
func TestOverloadIsToldAtOnce(t *testing.T) {
	took := refusals(t)
	assert.Less(t, quantile(took, .1), .005)
	assert.Less(t, quantile(took, .5), .05) // a busy machine adds to it
	t.Logf("p50 %.6f s, p99 %.6f s", quantile(took, .5), quantile(took, .99))
}

// refusals measures refusals over HTTP, in sorted seconds.
func refusals(t *testing.T) []float64 {
	t.Helper()
	g, err := open(t.Context(), run{by: narrowPrefill, capacity: .001, decode: time.Minute,
		timeout: time.Hour, limits: &admit.Options{PrefillLimit: 1, Queue: -1}})
	require.NoError(t, err)
	flow := g.flow
	server := httptest.NewServer(flow)
	ctx, cancel := context.WithCancel(t.Context())
	held := make(chan error)
	go func() { _, err := g.send(ctx, 0, []byte(body)); held <- err }()
	require.Eventually(t, func() bool { return len(flow.Sessions()) == 1 && flow.Sessions()[0].Phase == "prefill" },
		20*time.Second, time.Millisecond)
	var took []float64
	for range 2000 {
		start := time.Now()
		resp, err := server.Client().Post(server.URL+"/v1/completions", "application/json",
			strings.NewReader(`{"model":"m","prompt":"hello"}`))
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, errors.Join(err, resp.Body.Close()))
		require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
		took = append(took, time.Since(start).Seconds())
	}
	cancel()
	require.Error(t, <-held)
	server.Close()
	g.stop()
	slices.Sort(took)
	return took
}

// TestOverloadsPage writes the page where PDKIT_UPDATE=1.
func TestOverloadsPage(t *testing.T) {
	if os.Getenv("PDKIT_UPDATE") != "1" {
		t.Skip("PDKIT_UPDATE=1 writes docs/reliability/overload.md and overload.png")
	}
	const folder = "../../docs/reliability/"
	r := run{by: narrowPrefill, capacity: 80, lasts: time.Minute, decode: 200 * time.Millisecond,
		timeout: 2 * time.Second}
	points := make([]point, len(loads))
	for i, load := range loads {
		synctest.Test(t, func(t *testing.T) {
			var err error
			points[i], err = both(t.Context(), r, load)
			require.NoError(t, err)
		})
	}
	var rows []string
	for _, by := range []narrow{narrowPrefill, narrowBatch, narrowDecode} {
		for _, real := range []bool{false, true} {
			r := coldStart(by)
			r.http = real
			row := func(t *testing.T) {
				res, err := measure(t.Context(), r, 1)
				require.NoError(t, err)
				rows = append(rows, coldRow(r, res))
			}
			if real {
				row(t)
			} else {
				synctest.Test(t, row)
			}
		}
	}
	about := fmt.Sprintf("Time is simulated (testing/synctest), so what waits for nothing takes no time; in real "+
		"time, 99 %% of 2,000 refusals over HTTP took less than %.2f ms.", 1000*quantile(refusals(t), .99))
	require.NoError(t, os.WriteFile(folder+"overload.md", []byte(page(r, points, rows,
		"PDKIT_UPDATE=1 go test -run TestOverloadsPage ./overload", about)), 0o644))
	require.NoError(t, drawing(folder+"overload.png", r, points))
}
