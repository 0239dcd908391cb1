// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"html"
	"image/png"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/measure"
)

// busyGateway is a real gateway under load. It returns its admin address.
func busyGateway(t *testing.T) string {
	t.Helper()
	client, admin := realGateway(t, 6)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = measure.Run(ctx, measure.Options{Targets: []measure.Target{{URL: client, Model: "tiny"}},
			Load: measure.Load{Rate: 12, Duration: time.Hour}, Prompts: varied{}, Seed: 1})
	}()
	t.Cleanup(func() { stop(); <-ended })
	return admin
}

// varied are prompts and responses of several lengths.
type varied struct{}

func (varied) Prompt(_, n int) measure.Prompt {
	return measure.Prompt{Path: measure.Completions, Body: map[string]any{
		"prompt": strings.Repeat("some words ", 5+(11*n)%60), "max_tokens": 10 + (7*n)%50}}
}

var colourCodes = regexp.MustCompile("\x1b\\[[0-9;]*m")

// What pdctl watch shows in a real terminal, of a real gateway under load. PDKIT_UPDATE=1 writes the picture of the
// docs.
func TestWatchInATerminal(t *testing.T) {
	installed(t, "tmux")
	self, err := os.Executable()
	require.NoError(t, err)
	admin := busyGateway(t)
	for _, c := range []struct {
		columns, rows int
		ended, pairs  int // lines: so many at least, exactly so many
		env           string
	}{{120, 40, 10, 6, "NO_COLOR="}, {80, 32, 6, 4, "NO_COLOR="}, {80, 24, 3, 2, "NO_COLOR=1"},
		{44, 20, 1, 0, "NO_COLOR="}} {
		t.Run(fmt.Sprintf("%dx%d %s", c.columns, c.rows, c.env), func(t *testing.T) {
			x := newTerminal(t, c.columns, c.rows, fmt.Sprintf("trap : INT; echo begin; env %s %s watch --admin %s; "+
				"echo ended with $?; exec sleep 60", c.env, quote(self), admin))
			coloured := x.screen(func(screen string) bool {
				failed := strings.Contains(screen, "failed attempts") || c.rows < 40
				return strings.Count(screen, "disaggregated") >= c.ended && failed &&
					strings.Count(screen, " → ") >= c.pairs && regexp.MustCompile(`served [0-9]`).MatchString(screen) &&
					regexp.MustCompile(`tokens taken over [0-9]`).MatchString(screen)
			})
			assert.Equal(t, c.env != "NO_COLOR=1", strings.Contains(coloured, "\x1b[32m"))
			screen := strings.Split(strings.TrimRight(colourCodes.ReplaceAllString(coloured, ""), "\n"), "\n")
			assert.True(t, strings.HasPrefix(screen[0], "pdkit gateway  ready  "), screen[0])
			assert.LessOrEqual(t, len(screen), c.rows)
			assert.Regexp(t, `  queue \d+\s+prefill \d+ of \d+\s+decode \d+ of \d+`, strings.Join(screen, "\n"))
			numbers, pairs, times := map[int]int{}, map[int]int{}, map[int]int{}
			for _, line := range screen {
				line = strings.TrimRight(line, " ")
				assert.LessOrEqual(t, width(line), c.columns, line)
				if n := ending(line, `^  (engine|127\.0\S+ +[a-z]).*$`); n > 0 {
					numbers[n]++
				}
				if n := ending(line, `^  (.*first token|127\S+ → .*( m?s|–))  `); n > 0 {
					pairs[n]++
				}
				if n := ending(line, `^  [0-9a-f]+…  [a-z_]+ +[0-9.]+ m?s`); n > 0 {
					times[n]++
				}
			}
			assert.Len(t, numbers, 1, "the table's columns are aligned: %q", screen)
			if c.pairs > 0 {
				assert.Len(t, pairs, 1, "pairs are aligned: %q", screen)
			}
			assert.Equal(t, c.pairs, strings.Count(coloured, " → "), "%q", screen)
			assert.Len(t, times, 1, "times are aligned: %q", screen)
			if c.columns == 120 {
				drawTerminal(t, coloured, c.columns)
			}
			_, err := x.tmux("send-keys", "C-c")
			require.NoError(t, err)
			after := x.screen(func(screen string) bool { return strings.Contains(screen, "ended with 0") })
			assert.Contains(t, after, "begin", "the screen is as it was before")
			assert.NotContains(t, after, "disaggregated")
		})
	}
}

// A gateway that still accepts connections and answers nothing leaves the last picture, which says so; the next answer
// takes its place. A line that is too long is cut, not wrapped.
func TestWatchTellsThatTheGatewayHangs(t *testing.T) {
	recorded, err := os.ReadFile("testdata/live.json")
	require.NoError(t, err)
	var asked atomic.Int64
	answer := make(chan struct{})
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) > 1 {
			select {
			case <-answer:
			case <-r.Context().Done():
				return
			}
		}
		_, _ = w.Write(recorded)
	}))
	t.Cleanup(gateway.Close)
	self, err := os.Executable()
	require.NoError(t, err)
	x := newTerminal(t, 44, 24, fmt.Sprintf("env NO_COLOR=1 %s watch --every 100ms --admin %s; exec sleep 60",
		quote(self), gateway.URL))
	hangs := x.screen(func(screen string) bool { return strings.Contains(screen, "no news") })
	want := cut("no news: "+gateway.URL+" does not answer", 44)
	assert.Equal(t, want, strings.TrimRight(strings.Split(hangs, "\n")[1], " "))
	assert.Contains(t, hangs, "127.0.0.1:", "the last picture stays")
	assert.Contains(t, hangs, "decode_rejected")
	for line := range strings.SplitSeq(hangs, "\n") {
		assert.LessOrEqual(t, width(line), 44)
	}
	close(answer)
	x.screen(func(screen string) bool {
		return strings.Contains(screen, "decode_rejected") && !strings.Contains(screen, "no news")
	})
}

// ending is the column at which the pattern ends in a line; 0 if the line does not have it.
func ending(line, pattern string) int {
	at := regexp.MustCompile(pattern).FindStringIndex(line)
	if at == nil {
		return 0
	}
	return width(line[:at[1]])
}

// drawTerminal draws a screen as docs/watch.png.
func drawTerminal(t *testing.T, screen string, columns int) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "watch.png")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "watch.html"), []byte(terminalPage(screen)), 0o600))
	lines := strings.Count(strings.TrimRight(screen, "\n"), "\n") + 1
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, installed(t, "chromium"), "--headless=new", "--no-sandbox", "--disable-gpu",
		"--hide-scrollbars", "--user-data-dir="+t.TempDir(), "--force-device-scale-factor=1.5",
		fmt.Sprintf("--window-size=%d,%d", columns*9+56, lines*21+52), "--screenshot="+file,
		"file://"+filepath.Join(dir, "watch.html")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	picture, err := png.Decode(f)
	require.NoError(t, err)
	assert.Greater(t, picture.Bounds().Dx(), 9*columns)
	if os.Getenv("PDKIT_UPDATE") != "" {
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile("../../docs/watch.png", data, 0o600))
	}
}

// terminalPage writes a screen as HTML, in colours like those of the live page.
func terminalPage(screen string) string {
	colours := map[string]string{"31": "#e66a64", "32": "#58b98b", "33": "#dcaa4e", "34": "#6c9fd2", "35": "#d06aa5",
		"90": "#98a1ac"}
	var b strings.Builder
	b.WriteString(`<!doctype html><meta charset="utf-8"><style>
body { margin: 0; background: #14171a } pre { margin: 24px 28px; color: #e6e8ea; font: 15px/21px "DejaVu Sans Mono" }
</style><pre>`)
	colour, weight := "", "normal"
	rest := strings.TrimRight(screen, "\n")
	for rest != "" {
		at := colourCodes.FindStringIndex(rest)
		if at == nil {
			at = []int{len(rest), len(rest)}
		}
		text := html.EscapeString(rest[:at[0]])
		for bar, height := range map[string]string{"▆": "75%", "▃": "38%"} { // as terminals draw them: without gaps
			text = regexp.MustCompile(bar+"+").ReplaceAllStringFunc(text, func(run string) string {
				return fmt.Sprintf(`<i style="background:linear-gradient(0deg,%s %s,transparent 0)">%s</i>`, colour,
					height, strings.Repeat(" ", width(run)))
			})
		}
		fmt.Fprintf(&b, `<span style="color:%s;font-weight:%s">%s</span>`, colour, weight, text)
		for code := range strings.SplitSeq(strings.Trim(rest[at[0]:at[1]], "\x1b[m"), ";") {
			switch {
			case code == "" || code == "0":
				colour, weight = "", "normal"
			case code == "1":
				weight = "bold"
			case code == "39":
				colour = ""
			case colours[code] != "":
				colour = colours[code]
			}
		}
		rest = rest[at[1]:]
	}
	return b.String() + "</pre>"
}
