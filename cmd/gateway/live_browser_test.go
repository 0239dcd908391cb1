// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"image/png"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// The page in a real browser, under load: wide, on a phone, and dark. PDKIT_UPDATE=1 writes the pictures of the docs.
func TestTheLiveViewInChromium(t *testing.T) {
	t.Parallel()
	g := underLoad(t)
	for _, c := range []struct {
		name          string
		width, height int
		phone, dark   bool
	}{
		{"live", 1280, 1900, false, false},
		{"live-dark", 1280, 1900, false, true},
		{"live-phone", 390, 844, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := openBrowser(t, g.admin+"/debug/live/", c.width, c.height, c.phone, c.dark)
			b.until(`document.querySelectorAll("#ended .bar").length > 40`)
			assert.Equal(t, c.width, eval[int](b, `document.documentElement.scrollWidth`), "it scrolls sideways")
			// A bar hides what is longer than itself: a request that took longer than nearly all others.
			assert.Empty(t, eval[[]string](b, `[...document.querySelectorAll("body *:not(.bar > *)")].filter((e) =>
				e.getClientRects().length && getComputedStyle(e).position !== "absolute" &&
				e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.className + " " + e.textContent)`))
			keep := func(name string) []byte {
				shot := b.picture()
				if os.Getenv("PDKIT_UPDATE") != "" {
					require.NoError(t, os.WriteFile("../../docs/"+name+".png", shot, 0o600))
				}
				return shot
			}
			eval[any](b, `document.querySelector("#ended details").open = true`)
			if c.phone {
				keep(c.name)
				eval[any](b, `document.getElementById("requests-title").scrollIntoView()`)
				c.name += "-requests"
			}
			b.until(`document.querySelector("#ended dl") !== null`)
			shot := keep(c.name)
			picture, err := png.Decode(bytes.NewReader(shot))
			require.NoError(t, err)
			colours := map[string]int{}
			for x := range picture.Bounds().Dx() {
				for y := range picture.Bounds().Dy() {
					r, g, b, _ := picture.At(x, y).RGBA()
					colours[fmt.Sprintf("%02x%02x%02x", r>>8, g>>8, b>>8)]++
				}
			}
			parts := []string{"4477aa", "3c9a6e"} // prefill and decode; some 160 pixels of each are the legend's
			if c.dark {
				parts = []string{"6c9fd2", "58b98b"}
			}
			for _, part := range parts {
				assert.Greater(t, colours[part], 2000, "%s shows no part of a timeline in #%s", c.name, part)
			}
		})
	}
}

// All that a mouse can open is reached by Tab and the arrow keys, and opens by Enter. One sees where the focus is, and
// it stays there while the page draws itself anew.
func TestTheLiveViewByKeyboard(t *testing.T) {
	t.Parallel()
	g := underLoad(t)
	b := openBrowser(t, g.admin+"/debug/live/", 1280, 900, false, false)
	b.until(`document.querySelectorAll("#ended summary").length > 20`)
	focused := func() string {
		return eval[string](b, `(() => { const e = document.activeElement; const list = e.closest(".rows");
			if (list || e === document.body) return list ? list.id : "";
			return e.id || e.className || e.textContent.replace(/\d.*$/, ""); })()`)
	}
	b.press("p") // what moves cannot be told from what the keys do
	b.until(`document.getElementById("state").textContent === "ready, paused"`)
	var order []string
	for range 7 {
		b.press("Tab")
		order = append(order, focused())
		assert.True(t, eval[bool](b, `(() => { const s = getComputedStyle(document.activeElement);
			return s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 3; })()`),
			"%s: no focus is seen", focused())
		b.until(`(() => { const r = document.activeElement.getBoundingClientRect(); // it scrolls with the next frame
			return r.width > 0 && r.height > 0 && r.left >= 0 && r.top > -1 && r.bottom < innerHeight + 1; })()`)
	}
	assert.Equal(t, []string{"skip", "pause", "Engines", "Pairs", "filter", "running", "ended"}, order)
	b.press("Tab")
	assert.NotEqual(t, "ended", focused(), "one stop for each list, not for each row")

	b.press("f")
	assert.Equal(t, "filter", focused())
	b.press("Tab")
	b.press("Tab")
	require.Equal(t, "ended", focused())
	at := `[...document.querySelectorAll("#ended summary")].indexOf(document.activeElement)`
	for _, step := range []struct {
		key string
		at  int
	}{{"ArrowDown", 1}, {"ArrowDown", 2}, {"ArrowUp", 1}, {"Home", 0}, {"ArrowUp", 0}, {"ArrowDown", 1}} {
		b.press(step.key)
		assert.Equal(t, step.at, eval[int](b, at), step.key)
	}
	b.press("Enter")
	open := `document.activeElement.parentElement.open`
	assert.True(t, eval[bool](b, open))
	b.until(`document.activeElement.parentElement.innerText.includes("transfer and first token") ||
		document.activeElement.parentElement.innerText.includes("error")`)
	row := eval[string](b, `document.activeElement.closest("li").dataset.key`)
	b.press("p")
	b.until(`document.querySelectorAll("#ended li").length > 60`) // newer ones have pushed it out, and it stays
	assert.Equal(t, row, eval[string](b, `document.activeElement.closest("li").dataset.key`), "the focus has moved")
	assert.True(t, eval[bool](b, open))
	b.press("Escape")
	assert.False(t, eval[bool](b, open))

	b.press("f") // folding the pairs away
	b.call("Input.dispatchKeyEvent", map[string]any{"type": "keyDown", "key": "Tab", "code": "Tab",
		"windowsVirtualKeyCode": 9, "modifiers": 8}, nil) // Shift+Tab
	require.Equal(t, "Pairs", focused())
	b.press("Enter")
	assert.False(t, eval[bool](b, open))
}

// What a screen reader meets has landmarks, headings, and names.
func TestTheLiveViewForScreenReaders(t *testing.T) {
	t.Parallel()
	g := underLoad(t)
	b := openBrowser(t, g.admin+"/debug/live/", 1280, 900, false, false)
	b.until(`document.querySelectorAll("#ended summary").length > 20`)
	eval[any](b, `pause()`)
	var all []string
	for _, n := range b.nodes() {
		all = append(all, n.String())
	}
	tree := strings.Join(all, "\n")
	for _, want := range []string{`banner ""`, `main ""`, `region "Models `, `region "Requests"`, `heading "tiny"`,
		`article "tiny"`, `table "Engines of tiny"`, `table "Pairs of tiny"`, `columnheader "prefill → decode"`,
		`rowheader "127.0.0.1:`, `status ""`, `button "Go on"`, `combobox "Show"`, `list "In flight bars to`,
		`list "Ended bars to`, `list "Colours of the timelines"`, `link "Skip to requests"`} {
		assert.Contains(t, tree, want)
	}
	assert.Regexp(t, `(?m)^image "queue .* prefill .* transfer and first token .* decode `, tree,
		"a timeline is told in words")
	assert.NotRegexp(t, `(?m)^(button|combobox|link|image|table|list) ""$`, tree, "something has no name")
	assert.Equal(t, []int{1, 2, 3}, eval[[]int](b, `[...new Set([...document.querySelectorAll("h1,h2,h3,h4")]
		.map((h) => +h.tagName[1]))].sort()`))
	assert.Empty(t, eval[[]string](b, `(() => { // texts whose contrast is below 4.5, by WCAG
		const light = (c) => { const [r, g, b] = c.match(/[\d.]+/g).map((v) => { v /= 255;
			return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
			return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
		const behind = (e) => { for (; e; e = e.parentElement) {
			const c = getComputedStyle(e).backgroundColor; if (c !== "rgba(0, 0, 0, 0)") return c; } };
		return [...document.querySelectorAll("body *")].filter((e) => e.innerText && e.getClientRects().length &&
			[...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())).filter((e) => {
			const a = light(getComputedStyle(e).color), b = light(behind(e));
			return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5; }).map((e) => e.outerHTML); })()`))
}

// underLoad is a gateway whose fleet has limits and works, with some failures.
func underLoad(t *testing.T) *program {
	t.Helper()
	chromium(t) // before all that it is to show
	g := start(t, gatewayYAML("")+liveFleet(t), "-inspect", "200ms")
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	t.Cleanup(func() { stop(); clients.Wait() })
	for c := range 14 {
		clients.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				liveRequest(ctx, g, fmt.Sprintf(`{"model":"tiny","prompt":"%s","max_tokens":%d,"stream":true,
					"stream_options":{"include_usage":true}}`, strings.Repeat("some words ", 5+(7*c+11*i)%60),
					10+(5*c+7*i)%50))
			}
		})
	}
	require.Eventually(t, func() bool {
		state, _ := g.live()
		return len(state.Requests) > 60 && len(state.Models[0].Totals.Errors) > 0
	}, 30*time.Second, 100*time.Millisecond)
	return g
}

// liveFleet is a model with two prefill and three decode engines that take their time; one of these fails now and then.
func liveFleet(t *testing.T) string {
	t.Helper()
	var engines []*enginesim.Engine
	for i := range 3 {
		p, d := simPair(t, enginesim.Config{PrefillRate: 350},
			enginesim.Config{ITL: time.Duration(6+3*i) * time.Millisecond})
		engines = append(engines, p, d)
	}
	engines[4] = nil
	fails := func(count int) {
		engines[5].Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 8,
			Count: count})
	}
	fails(2)
	fail := time.NewTicker(time.Second)
	t.Cleanup(fail.Stop)
	go func() {
		for {
			select {
			case <-t.Context().Done():
				return
			case <-fail.C:
				fails(1)
			}
		}
	}()
	return simYAML("  admission: {mode: fixed, inFlightPerPrefill: 1, inFlightPerDecode: 64}\n", engines...)
}

// liveRequest sends one request and reads its response, however it ends. It reports whether the response was a whole one.
func liveRequest(ctx context.Context, g *program, body string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, g.client+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return false
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	_, err = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return err == nil && resp.StatusCode == http.StatusOK
}
