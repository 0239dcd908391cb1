// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"image/png"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/measure"
	"github.com/pdkit/pdkit/enginesim"
)

func bench(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	return pdctl(t, "", append([]string{"bench"}, args...)...)
}

func TestBenchMeasuresAServer(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Close() })
	dir := t.TempDir()
	page, picture := filepath.Join(dir, "r.html"), filepath.Join(dir, "r.png")
	code, out, errs := bench(t, "--url", e.URL(), "--clients", "2", "--requests", "6", "--max-tokens", "4",
		"--prompt-tokens", "20", "--slo-ttft", "1m", "--slo-itl", "1m", "--html", page, "--png", picture)
	require.Equal(t, exitOK, code, "%s%s", out, errs)
	assert.Regexp(t, `served +6\n`, out)
	assert.Regexp(t, `failed +0\n`, out)
	assert.Contains(t, out, "goodput")
	assert.Empty(t, errs, "no bar where nobody looks at a terminal")
	html, err := os.ReadFile(page)
	require.NoError(t, err)
	assert.Contains(t, string(html), "<h1>pdctl bench</h1>")
	assert.NotContains(t, string(html), `src="http`, "the page needs no other file")
	f, err := os.Open(picture)
	require.NoError(t, err)
	defer f.Close()
	drawn, err := png.Decode(f)
	require.NoError(t, err)
	assert.Greater(t, drawn.Bounds().Dx(), 500)

	e.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Count: -1})
	code, out, _ = bench(t, "--url", e.URL(), "--model", "tiny", "--clients", "1", "--requests", "2", "--json")
	assert.Equal(t, exitFaults, code)
	assert.True(t, json.Valid([]byte(out)), out)
	assert.Contains(t, out, "500")
}

func TestBenchRefusesWhatItCannotMeasure(t *testing.T) {
	escapes := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"data":[{"id":"a\u001b[2J"}]}`))
	}))
	defer escapes.Close()
	refuses := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusUnauthorized)
	}))
	defer refuses.Close()
	for args, want := range map[string]string{
		"--clients 1":                                        "--url",
		"--url nonsense --clients 1":                         "--url is no URL",
		"--url ftp://127.0.0.1:1 --clients 1":                "--url is no URL",
		"--url http://127.0.0.1:1":                           "--rate for an open loop",
		"--url http://127.0.0.1:1 --rate 1 --clients 1":      "--rate for an open loop",
		"--url http://127.0.0.1:1 --rate NaN":                "--rate is a number",
		"--url http://127.0.0.1:1 --rate +Inf":               "--rate is a number",
		"--url http://127.0.0.1:1 --rate=-1":                 "--rate is a number",
		"--url http://127.0.0.1:1 --clients 0":               "--clients is a number",
		"--url http://127.0.0.1:1 --clients 4,0":             "--clients is a number",
		"--url http://127.0.0.1:1 --rate 1 --requests=-1":    "negative",
		"--url http://127.0.0.1:1 --clients 1 --rounds 0":    "at least 1",
		"--url http://127.0.0.1:1 --clients 1":               "http://127.0.0.1:1 does not answer: connection refused",
		"--url http://me:hush@127.0.0.1:1 --clients 1":       "pdctl: http://127.0.0.1:1 does not answer",
		"--url " + refuses.URL + "/v1 --clients 1":           refuses.URL + "/v1/models: status 401",
		"--url http://127.0.0.1:1 --clients 1 --prompts /no": "prompts",
		"--url " + escapes.URL + " --clients 1":              "control characters",
	} {
		code, out, errs := bench(t, strings.Fields(args)...)
		assert.Equal(t, exitUsage, code, args)
		assert.Empty(t, out, args)
		assert.Contains(t, errs, want, args)
	}
}

// Those who come from vllm bench serve, genai-perf and wrk find their words.
func TestBenchKnowsTheWordsOfOthers(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Close() })
	file := filepath.Join(t.TempDir(), "result.json")
	code, out, errs := bench(t, "--base-url", strings.TrimPrefix(e.URL(), "http://"), "--concurrency", "1,2",
		"--num-prompts", "3", "--random-input-len", "50", "--random-output-len", "3", "--slo-itl", "1m",
		"--slo-e2el", "1m", "--result-filename", file)
	require.Equal(t, exitOK, code, "%s%s", out, errs)
	assert.Contains(t, out, "closed loops of 1, 2 clients, 3 requests each")
	assert.Contains(t, out, "goodput: TPOT ≤ 6e+04 ms, E2E ≤ 6e+04 ms")
	raw, err := os.ReadFile(file)
	require.NoError(t, err)
	var c measure.Curve
	require.NoError(t, json.Unmarshal(raw, &c))
	require.Len(t, c.Points, 2)
	assert.Equal(t, 3, c.Points[1].Targets[0].Served)
	code, out, errs = bench(t, "--url", e.URL(), "--request-rate", "50", "--request-count", "3")
	assert.Equal(t, exitOK, code, errs)
	assert.Contains(t, out, "open loop, 50 requests/s (Poisson), 3 requests")
}

// Ctrl-C ends a real process soon, and it writes what was measured until then. The server holds the request of each
// client when the signal is sent: a client might else be between two requests.
func TestBenchEndsAtCtrlC(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	for _, signal := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		var asked, held atomic.Int64
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = w.Write([]byte("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n"))
			_ = http.NewResponseController(w).Flush()
			if asked.Add(1) > 9 { // the first one asks how many tokens a word is
				held.Add(1)
				<-r.Context().Done()
				return
			}
			_, _ = w.Write([]byte("data: [DONE]\n\n"))
		}))
		cmd := exec.CommandContext(t.Context(), self, "bench", "--url", server.URL, "--model", "m", "--clients", "2",
			"--duration", "1h", "--json")
		cmd.Env = append(os.Environ(), "PDCTL_TEST_AS_PROGRAM=1")
		var out, errs strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &errs
		require.NoError(t, cmd.Start())
		assert.Eventually(t, func() bool { return held.Load() == 2 }, 20*time.Second, 10*time.Millisecond)
		sent := time.Now()
		require.NoError(t, cmd.Process.Signal(signal))
		_ = cmd.Wait()
		server.Close()
		assert.Less(t, time.Since(sent), 20*time.Second)
		assert.Equal(t, exitInterrupted, cmd.ProcessState.ExitCode())
		assert.Equal(t, "pdctl: interrupted\n", errs.String())
		var r measure.Report
		require.NoError(t, json.Unmarshal([]byte(out.String()), &r), out.String())
		assert.True(t, r.Interrupted)
		assert.Equal(t, 8, r.Targets[0].Served)
		assert.Positive(t, r.Targets[0].TTFT.P50)
		assert.Zero(t, r.Failed())
		assert.Equal(t, 2, r.Unfinished)
	}
}

// A gateway tells in X-PD-Mode how it served a request. Each form of the report has the shares.
func TestBenchTellsHowAGatewayServed(t *testing.T) {
	modes := strings.Fields("disaggregated aggregated disaggregated fallback")
	var n atomic.Int64
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-PD-Mode", modes[int(n.Add(1)-1)%len(modes)])
		_, _ = w.Write([]byte("data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\ndata: [DONE]\n\n"))
	}))
	defer gateway.Close()
	page := filepath.Join(t.TempDir(), "r.html")
	args := []string{"--url", gateway.URL, "--model", "m", "--clients", "1", "--requests", "12"}
	code, out, errs := bench(t, append(args, "--html", page)...)
	require.Equal(t, exitOK, code, errs)
	const want = "served as: aggregated 25 %, disaggregated 50 %, fallback 25 %"
	assert.Contains(t, out, "\n"+want+"\n")
	html, err := os.ReadFile(page)
	require.NoError(t, err)
	assert.Contains(t, string(html), want)
	_, out, _ = bench(t, append(args, "--json")...)
	var r measure.Report
	require.NoError(t, json.Unmarshal([]byte(out), &r), out)
	assert.Equal(t, map[string]int{"disaggregated": 6, "aggregated": 3, "fallback": 3}, r.Targets[0].Modes)
}

// The README shows a real run. Of another run only the numbers differ.
func TestThePageShowsARealBench(t *testing.T) {
	client, _ := realGateway(t, 0)
	page, err := os.ReadFile("README.md")
	require.NoError(t, err)
	before, rest, found := strings.Cut(string(page), "```text\n$ pdctl bench ")
	require.True(t, found)
	shown, after, _ := strings.Cut(rest, "```")
	command, want, _ := strings.Cut(shown, "\n")
	args := strings.Fields(strings.ReplaceAll(command, "http://127.0.0.1:8000", client))
	code, out, errs := bench(t, args...)
	require.Equal(t, exitOK, code, errs)
	out = strings.ReplaceAll(out, client, "http://127.0.0.1:8000")
	if os.Getenv("PDKIT_UPDATE") != "" {
		shown = "```text\n$ pdctl bench " + command + "\n" + out + "```"
		require.NoError(t, os.WriteFile("README.md", []byte(before+shown+after), 0o600))
		want = out
	}
	assert.Equal(t, form(want), form(out))
}

var (
	numbers = regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)
	spaces  = regexp.MustCompile(` +`)
	warning = regexp.MustCompile(`(?m)^warning: .*\n`) // a busy machine may have one
)

// form is a report without its numbers.
func form(report string) string {
	report = warning.ReplaceAllString(report, "")
	return spaces.ReplaceAllString(numbers.ReplaceAllString(report, "N"), " ")
}
