// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// badDay is a gateway with two prefill and three decode engines, whose clients send 50 requests a second.
type badDay struct {
	*program
	p, d   []string // the engines' IDs
	failed atomic.Int64
	end    func() // of the clients
}

// startBadDay makes a bad day: P1 answers 500 to one request in ten, D0 cuts one stream in twenty, and D1 is 900 ms late
// for four in ten.
func startBadDay(t *testing.T) *badDay {
	t.Helper()
	day := &badDay{}
	var engines []*enginesim.Engine
	for i := range 3 {
		p, d, err := enginesim.Pair(enginesim.Config{KeepRequests: -1}, enginesim.Config{KeepRequests: -1})
		require.NoError(t, err)
		t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
		switch i {
		case 0:
			engines = append(engines, p, d)
			d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 5,
				Count: -1, Share: .05})
		case 1:
			engines = append(engines, p, d)
			p.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Leg: enginesim.LegPrefill, Count: -1,
				Share: .1})
			d.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Leg: enginesim.LegDecode,
				Delay: 900 * time.Millisecond, Count: -1, Share: .4})
		case 2:
			engines = append(engines, nil, d)
		}
		if i < 2 {
			day.p = append(day.p, strings.TrimPrefix(p.URL(), "http://"))
		}
		day.d = append(day.d, strings.TrimPrefix(d.URL(), "http://"))
	}
	day.program = start(t, gatewayYAML("")+simYAML("", engines...), "-inspect", "5s")
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	day.end = func() { stop(); clients.Wait() }
	t.Cleanup(day.end)
	clients.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			clients.Go(func() {
				if !liveRequest(t.Context(), day.program, fmt.Sprintf(`{"model":"tiny","prompt":"%d %s",
					"max_tokens":16,"stream":true}`, i, strings.Repeat("some words ", 5+i%40))) {
					day.failed.Add(1)
				}
			})
		}
	})
	return day
}

// On a bad day the view names the engines that are sick, before all else, by a word for what is wrong and since when.
// What clients saw is told apart from attempts of which others made good. It does not run beside other tests, with
// which all engines of a busy machine are slow.
func TestTheLiveViewNamesTheSickEngines(t *testing.T) {
	chromium(t)
	begin := time.Now().Add(-slotLength)
	day := startBadDay(t)
	want := map[string]string{day.p[1]: "failing", day.d[0]: "cut streams", day.d[1]: "slow"}
	marked := func() map[string]string {
		s, _ := day.live()
		words := map[string]string{}
		for _, e := range s.Models[0].Endpoints {
			if e.Recent == nil {
				continue
			}
			for _, m := range e.Recent.Marks {
				words[e.ID] += m.Word
				assert.WithinRange(t, m.Since, begin, time.Now())
			}
		}
		return words
	}
	require.EventuallyWithT(t, func(c *assert.CollectT) { assert.Equal(c, want, marked()) }, 2*time.Minute,
		100*time.Millisecond)

	b := openBrowser(t, day.admin+"/debug/live/", 1280, 900, false, false)
	b.until(`document.querySelectorAll("#ended .bar").length > 40`)
	kv := `[...document.querySelectorAll(".facts dt")].find((dt) => dt.textContent === "KV taken over")
		.nextSibling.firstChild.textContent`
	for range 4 {
		b.until(kv + ` !== "–"`)
		assert.Regexp(t, `^[1-9]`, eval[string](b, kv), "engines are read each 5 s only")
		time.Sleep(500 * time.Millisecond)
	}
	b.until(`document.getElementById("sick").textContent === "3 engines are not well"`)
	b.press("p") // what is asked for below is one picture
	named := eval[[]string](b, `[...document.querySelectorAll(".sick li")].map((li) => li.innerText)`)
	rows := eval[[]string](b, `[...document.querySelectorAll(".card tbody")[0].rows].map((row) => row.innerText)`)
	require.Len(t, named, 3)
	require.Len(t, rows, 5)
	for i, id := range []string{day.p[1], day.d[0], day.d[1]} { // the worst first
		assert.Regexp(t, "^"+want[id]+" "+id+" .* % of .* since [0-9:]{8}$",
			strings.Join(strings.Fields(named[i]), " "))
		assert.Contains(t, named[i], id)
		assert.Contains(t, rows[i], id)
		assert.Contains(t, rows[i], want[id]+"\nsince ")
	}
	for _, row := range rows[3:] {
		assert.Contains(t, row, "ready")
		assert.NotContains(t, row, "since")
	}
	assert.Less(t, eval[float64](b, `document.querySelector(".sick").getBoundingClientRect().bottom`), 300.,
		"it is seen before all else")
	assert.Equal(t, []int{1}, eval[[]int](b, `[...new Set([...document.querySelectorAll("#ended .id")].map((e) =>
		Math.round(e.getBoundingClientRect().height / parseFloat(getComputedStyle(e).lineHeight))))]`),
		"an id breaks its line")
	assert.Contains(t, eval[string](b, `[...document.querySelectorAll("#ended .engines")].map((e) => e.innerText)
		.join("\n")`), " → "+day.d[1])
	if file := os.Getenv("PDKIT_SHOT"); file != "" {
		require.NoError(t, os.WriteFile(file, b.picture(), 0o600))
	}

	day.end()
	require.EventuallyWithT(t, func(c *assert.CollectT) { // a request ends a moment after its response
		s, _ := day.live()
		hour := s.Models[0].Hour
		assert.Equal(c, day.failed.Load(), hour.Failed, "what clients saw")
		assert.GreaterOrEqual(c, hour.Broken, hour.Failed+hour.Mended, "some fail twice")
		assert.Greater(c, hour.Mended, hour.Failed)
	}, 20*time.Second, 50*time.Millisecond)
}

// A prefill engine that does not serve the model, and one whose KV nobody reads in time, are named by their words, in
// the list and in the table.
func TestTheLiveViewNamesAModelThatIsMissingAndALeaseThatIsOver(t *testing.T) {
	t.Parallel()
	chromium(t)
	f := newPlayed(t, func(c *enginesim.Config) { c.Lease = 500 * time.Millisecond })
	for _, d := range f.d {
		d.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Leg: enginesim.LegDecode, Delay: time.Second, Count: -1,
			Share: .5})
	}
	f.p[0].Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 404, Leg: enginesim.LegPrefill, Count: -1,
		Body: `{"error":{"message":"The model ` + "`tiny`" + ` does not exist.","type":"NotFoundError",` +
			`"param":"model","code":404}}`})
	f.serve(t, gatewayYAML("")+simYAML("", f.engines...))
	b := openBrowser(t, f.admin+"/debug/live/", 1280, 900, false, false)
	named := `[...document.querySelectorAll(".sick li")].map((li) => li.innerText.replace(/\s+/g, " ")).join("\n")`
	rows := `[...document.querySelectorAll(".card tbody")[0].rows].map((row) => row.innerText.replace(/\s+/g, " "))`
	for _, x := range []struct{ id, word, says string }{
		{strings.TrimPrefix(f.p[0].URL(), "http://"), "lacks the model", "attempts were told that it does not serve"},
		{strings.TrimPrefix(f.p[1].URL(), "http://"), "lease over", "attempts was not read within its lease"},
	} {
		b.until(fmt.Sprintf(`new RegExp(%q, "m").test(%s)`, "^"+x.word+" "+x.id+" prefill .*"+x.says+".* since", named))
		row := eval[string](b, fmt.Sprintf(`%s.find((row) => row.includes(%q))`, rows, x.id))
		assert.Regexp(t, x.word+" since [0-9:]+", row)
	}
}
