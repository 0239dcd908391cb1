// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// play runs the program to its end.
func play(t *testing.T, args ...string) (status int, out string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var b bytes.Buffer
	status = run(ctx, args, &b, false)
	return status, b.String()
}

func TestTheStoryIsToldAndProven(t *testing.T) {
	status, out := play(t)
	require.Equal(t, exitOK, status, out)
	for _, want := range []string{
		`(?m)^1\. completion$`, `(?m)^2\. completion, streamed$`, `(?m)^3\. chat$`, `(?m)^4\. chat, streamed$`,
		`(?m)^    remote_block_ids  +\[\[1,2,3,`, `(?m)^    remote_port  +\d+$`,
		`(?m)^  ok       D took the prompts over from P         (\d{4}) of (\d{4}) tokens$`,
		`(?m)^  ok       D read no prompt itself                0 tokens$`,
		`(?m)^  ok       The KV moved from P to D               [1-9]\d*\.\d kB$`,
		`(?m)^  ok       Each handoff was used exactly once     no breach$`,
		`(?m)^  ok       One engine alone gives the same text   4 of 4 responses$`,
	} {
		assert.Regexp(t, want, out)
	}
	assert.NotContains(t, out, "FAIL")
	assert.NotContains(t, out, "\x1b", "colours where nobody asked for them")
	for line := range strings.Lines(out) {
		assert.LessOrEqual(t, len(strings.TrimSuffix(line, "\n")), 80, "wider than a plain terminal: %s", line)
		assert.NotRegexp(t, ` \n$`, line, "blanks at the line's end")
	}

	// Each request has two bars, one after the other: P's ends where D's begins, and together they fill the width.
	p := regexp.MustCompile(`(?m)^  P        (#+)( *) +\d+ ms  read \d+ tokens$`).FindAllStringSubmatch(out, -1)
	d := regexp.MustCompile(`(?m)^  D        ( *)(=+) +\d+ ms  wrote 40 tokens$`).FindAllStringSubmatch(out, -1)
	require.Len(t, p, len(requests), out)
	require.Len(t, d, len(requests), out)
	for i := range p {
		assert.InDelta(t, len(p[i][1]), len(d[i][1]), 1, "request %d: D does not begin where P ends", i+1)
		assert.Equal(t, barWidth, len(d[i][1])+len(d[i][2]), "request %d", i+1)
	}
}

// With a connector that carries no handoff the text is right, but nothing is reused. The program must notice that.
func TestItSeesThatNothingWasReused(t *testing.T) {
	status, out := play(t, "-connector", "http")
	require.Equal(t, exitFailed, status)
	for _, want := range []string{
		`(?m)^  FAIL     D took the prompts over from P         0 of \d{4} tokens$`,
		`(?m)^  FAIL     D read no prompt itself                [1-9]\d{3} tokens$`,
		`(?m)^  FAIL     The KV moved from P to D               0\.0 kB$`,
		`(?m)^  FAIL     Each handoff was used exactly once     4 of: decode without transfer$`,
		`(?m)^  ok       One engine alone gives the same text   4 of 4 responses$`,
		`handoff  none`, `read, wrote 40 tokens`, `(?m)^Failed: this did not hold:$`,
	} {
		assert.Regexp(t, want, out)
	}
	assert.NotContains(t, out, "Yes:")
}

// The comparison with one engine alone can fail.
func TestItSeesAnotherText(t *testing.T) {
	conn, err := newConnector("nixl")
	require.NoError(t, err)
	lab, err := start(t.Context(), conn, "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, lab.stop()) }()
	a, err := ask(t.Context(), lab.url, requests[0], func(string) {})
	require.NoError(t, err)
	checks, err := prove(t.Context(), lab, []response{a})
	require.NoError(t, err)
	require.NoError(t, verdict(checks))
	a.text = strings.ToUpper(a.text) + "!"
	checks, err = prove(t.Context(), lab, []response{a})
	require.NoError(t, err)
	require.ErrorContains(t, verdict(checks), "this did not hold:\nOne engine alone gives the same text")
}

// The text of a stream is shown piece by piece, that of a whole response at once.
func TestTokensAreShownAsTheyCome(t *testing.T) {
	conn, err := newConnector("nixl")
	require.NoError(t, err)
	lab, err := start(t.Context(), conn, "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, lab.stop()) }()
	for _, r := range requests {
		for try := 1; ; try++ {
			var pieces []string
			var first, last time.Time
			a, err := ask(t.Context(), lab.url, r, func(p string) {
				if p == "" {
					return
				}
				if last = time.Now(); pieces == nil {
					first = last
				}
				pieces = append(pieces, p)
			})
			require.NoError(t, err)
			assert.Equal(t, a.text, strings.Join(pieces, ""))
			assert.Equal(t, responseTokens, a.tokens)
			if !r.stream {
				assert.Len(t, pieces, 1, r.what)
				break
			}
			assert.Len(t, pieces, responseTokens, r.what)
			if last.Sub(first) > responseTokens*engine.ITL/2 {
				break
			}
			require.Less(t, try, 10, "%s: the tokens came in a heap", r.what) // once, a busy reader may see one
		}
	}
}

func TestACutStreamIsNoResponse(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n")
	}))
	defer s.Close()
	_, err := ask(t.Context(), s.URL, requests[1], func(string) {})
	require.ErrorContains(t, err, "the stream broke off")
	http.DefaultClient.CloseIdleConnections()
}

func TestColoursAreForTerminalsOnly(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	t.Setenv("NO_COLOR", "")
	t.Setenv("TERM", "xterm")
	assert.False(t, wantsColour(w), "a pipe got colours")
	device, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0) // a character device, as a terminal is
	require.NoError(t, err)
	defer device.Close()
	assert.True(t, wantsColour(device))
	t.Setenv("NO_COLOR", "1")
	assert.False(t, wantsColour(device), "NO_COLOR is set")

	var plain, coloured bytes.Buffer
	checks := []check{{"a claim", "a sight", "a place", true}, {"another", "none", "nowhere", false}}
	(&screen{out: &plain}).proof(checks)
	(&screen{out: &coloured, colour: true}).proof(checks)
	assert.Contains(t, coloured.String(), "\x1b[31mFAIL\x1b[0m")
	assert.Equal(t, plain.String(), regexp.MustCompile("\x1b\\[\\d+m").ReplaceAllString(coloured.String(), ""),
		"colours move the text")
}

func TestWrongCommandLinesEndWithTwo(t *testing.T) {
	for _, args := range [][]string{{"-nonsense"}, {"-connector", "carrier-pigeon"}} {
		status, out := play(t, args...)
		assert.Equal(t, exitUsage, status)
		assert.Contains(t, out, args[len(args)-1])
	}
	status, out := play(t, "-h")
	assert.Equal(t, exitOK, status)
	assert.Contains(t, out, "-serve")
}

func TestATakenPortIsSaid(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	status, out := play(t, "-serve", "-listen", l.Addr().String())
	assert.Equal(t, exitFailed, status)
	assert.Contains(t, out, "-listen chooses another address")
}

// paper is a screen that is read while the program writes.
type paper struct {
	mu sync.Mutex
	b  strings.Builder
}

func (p *paper) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.b.Write(b)
}

func (p *paper) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.b.String()
}

// The commands that -serve prints work unchanged and show what they promise. After Ctrl-C a running stream still ends
// properly.
func TestServeStaysUpAndItsCommandsWork(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out, ended := &paper{}, make(chan int, 1)
	go func() { ended <- run(ctx, []string{"-serve", "-listen", "127.0.0.1:0"}, out, false) }()
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "Ctrl-C ends.") }, 5*time.Minute,
		10*time.Millisecond)

	commands := regexp.MustCompile(`(?m)^  (curl .*)$`).FindAllStringSubmatch(out.String(), -1)
	require.Len(t, commands, 4)
	do := func(i int) string { return execute(t, commands[i][1]) }
	before := do(0)
	completion, chat := do(1), do(2)
	after := do(3)
	assert.Contains(t, completion, `"object":"text_completion"`)
	assert.Regexp(t, `(?i)X-Pd-Mode: disaggregated`, completion)
	assert.Contains(t, chat, `"object":"chat.completion.chunk"`)
	assert.Contains(t, chat, "data: [DONE]")
	for _, c := range []struct {
		name, label string
		rises       bool
	}{
		{"vllm:prompt_tokens_by_source_total", `source="external_kv_transfer"`, true},
		{"vllm:prompt_tokens_by_source_total", `source="local_compute"`, false},
		{"vllm:nixl_bytes_transferred_sum", "", true},
	} {
		require.Contains(t, before, c.name)
		assert.Equal(t, c.rises, metric(after, c.name, c.label) > metric(before, c.name, c.label), "%s %s", c.name,
			c.label)
	}

	// The live view is that of the gateway that the commands ask.
	page := regexp.MustCompile(`(?m)^  (http://127\.0\.0\.1:\d+/debug/live/)$`).FindStringSubmatch(out.String())
	require.NotNil(t, page, out)
	assert.Contains(t, execute(t, "curl -s "+page[1]), "<title>pdkit gateway</title>")
	var state struct {
		Models []struct{ Totals struct{ Served int } }
	}
	require.NoError(t, json.Unmarshal([]byte(execute(t, "curl -s "+page[1]+"live.json")), &state))
	require.Len(t, state.Models, 1)
	assert.Equal(t, len(requests)+2, state.Models[0].Totals.Served)

	url := regexp.MustCompile(`gateway +(http://\S+)`).FindStringSubmatch(out.String())[1]
	last, err := ask(t.Context(), url, chat2(), func(s string) {
		if s != "" {
			interrupt()
		}
	})
	require.NoError(t, err, "Ctrl-C cut a stream")
	assert.Equal(t, responseTokens, last.tokens)
	select {
	case status := <-ended:
		require.Equal(t, exitOK, status, out)
	case <-time.After(30 * time.Second):
		t.Fatal("Ctrl-C does not end it")
	}
	assert.Contains(t, out.String(), "Draining")
	_, err = ask(t.Context(), url, chat2(), func(string) {})
	require.Error(t, err, "it still serves")
	_, err = net.Dial("tcp", strings.Split(page[1], "/")[2])
	require.Error(t, err, "the gateway of the live view still serves")
}

// Where the gateway cannot be built there is no live view, and all else is there.
func TestServeWithoutALiveView(t *testing.T) {
	t.Setenv("PATH", t.TempDir()) // no Go
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out, ended := &paper{}, make(chan int, 1)
	go func() { ended <- run(ctx, []string{"-serve", "-listen", "127.0.0.1:0"}, out, false) }()
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "Ctrl-C ends.") }, time.Minute,
		10*time.Millisecond)
	assert.Contains(t, out.String(), "There is no live view. It needs pdkit's repository and Go: ")
	assert.NotContains(t, out.String(), "/debug/live/")
	url := regexp.MustCompile(`gateway +(http://\S+)`).FindStringSubmatch(out.String())[1]
	assert.Contains(t, out.String(), "curl -si "+url+"/v1/completions")
	interrupt()
	require.Equal(t, exitOK, <-ended, out)
}

func chat2() request { return chat("Which lamp is new?"+notes, true) }

// execute does what a printed command does: in a shell if curl is installed, otherwise with the same request in Go.
func execute(t *testing.T, command string) string {
	t.Helper()
	if _, err := exec.LookPath("curl"); err == nil {
		out, err := exec.CommandContext(t.Context(), "sh", "-c", command).CombinedOutput()
		require.NoError(t, err, "%s\n%s", command, out)
		return string(out)
	}
	url := regexp.MustCompile(`http://\S+`).FindString(command)
	method, body := http.MethodGet, ""
	if data := regexp.MustCompile(`-d '([^']*)'`).FindStringSubmatch(command); data != nil {
		method, body = http.MethodPost, data[1]
	}
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	require.NoError(t, err)
	if h := regexp.MustCompile(`-H '([^:]*): ([^']*)'`).FindStringSubmatch(command); h != nil {
		req.Header.Set(h[1], h[2])
	}
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	var all bytes.Buffer
	require.NoError(t, resp.Header.Write(&all))
	_, err = all.ReadFrom(resp.Body)
	require.NoError(t, err)
	return all.String()
}
