// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

// interrupted is the exit status of a real pdctl that gets Ctrl-C when it has sent its first request, to a server that
// does not answer, or when it has written a file. SERVER and FILE in args are these.
func interrupted(t *testing.T, args ...string) int {
	t.Helper()
	asked := make(chan struct{}, 100)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		<-r.Context().Done()
	}))
	defer server.Close()
	self, err := os.Executable()
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "file")
	for i := range args {
		args[i] = strings.ReplaceAll(strings.ReplaceAll(args[i], "SERVER", server.URL), "FILE", file)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(os.Environ(), "PDCTL_TEST_AS_PROGRAM=1")
	require.NoError(t, cmd.Start())
	written := func() bool { _, err := os.Stat(file); return err == nil }
	assert.Eventually(t, func() bool { return len(asked) > 0 || written() }, 20*time.Second, 5*time.Millisecond,
		"no request of %v", args)
	sent := time.Now()
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	_ = cmd.Wait()
	assert.Less(t, time.Since(sent), 20*time.Second)
	return cmd.ProcessState.ExitCode()
}

// fourPorts returns the first of four free ports in a row, below those that systems give to clients.
func fourPorts(t *testing.T) string {
	t.Helper()
	first, err := freeport.Find(4)
	require.NoError(t, err)
	return strconv.Itoa(first)
}

// wrongGateway answers everything with an empty object.
func wrongGateway(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("{}"))
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// Each exit status that --help and README.md name for a command is returned, and no other.
func TestExitStatusesAreThoseOfThePage(t *testing.T) {
	page, err := os.ReadFile("README.md")
	require.NoError(t, err)
	p, d := simulated(t, enginesim.Config{}, enginesim.Config{})
	pair := " --prefill " + p.URL() + " --decode " + d.URL() + " --model tiny --probes 1"
	wrong, changed := wrongGateway(t), changedDecisions(t)
	cases := map[string][]string{
		"render": {"-f " + documents + "2-nixl.yaml", "-f /none"},
		"check": {"testdata/compose.yaml", "-f " + documents + "4-lmcache.yaml testdata/kthena-1069.yaml",
			"/none"},
		"verify": {"--connector nixl" + pair, "--connector http" + pair, "--connector nixl"},
		"watch":  {"--admin http://127.0.0.1:1"},
		"conform": {"--list", "--only wire/chat --timeout 5s --engines " + fourPorts(t) + " --url " + wrong,
			"--url x --cmd y"},
		"bench": {"--clients 1 --requests 1 --url " + p.URL(), "--clients 1 --requests 1 --model m --url " + wrong,
			"--clients 1"},
		"simulate":   {"--duration 1 --policies prefix", "--policies fastest"},
		"replay":     {recordedDecisions + " --verify", changed + " --verify", "/none --verify"},
		"completion": {"bash", "tcsh"},
	}
	interrupts := map[string]string{
		"verify":  "--connector nixl --prefill SERVER --decode SERVER/2 --model tiny",
		"watch":   "--admin SERVER",
		"conform": "--only wire/chat --engines " + fourPorts(t) + " --url SERVER",
		"bench":   "--clients 1 --url SERVER",

		"simulate": "--requests 10000000 --policies prefix --write FILE",
	}
	for command, text := range ends {
		t.Run(command, func(t *testing.T) {
			var want []int
			for _, number := range regexp.MustCompile(`\b[0-9]+\b`).FindAllString(text, -1) {
				n, err := strconv.Atoi(number)
				require.NoError(t, err)
				want = append(want, n)
			}
			var got []int
			for _, args := range cases[command] {
				code, _, _ := pdctl(t, "", append([]string{command}, strings.Fields(args)...)...)
				got = append(got, code)
			}
			if args := interrupts[command]; args != "" {
				got = append(got, interrupted(t, append([]string{command}, strings.Fields(args)...)...))
			}
			slices.Sort(got)
			assert.Equal(t, want, got)
			assert.Regexp(t, "(?m)^\\| `pdctl "+command+"` \\| [^|]+ \\| "+regexp.QuoteMeta(text)+" \\|", string(page))
			code, help, _ := pdctl(t, "", command, "--help")
			assert.Equal(t, exitOK, code)
			assert.Contains(t, strings.Join(strings.Fields(help), " "), "Exit status: "+text+".")
			for _, example := range examples[command] {
				assert.Contains(t, help, "\n    "+example+"\n", "on a line of its own")
			}
		})
	}
	assert.Len(t, cases, len(ends))
}

// Every command that prints results has --json, and then prints JSON alone.
func TestEveryCommandWritesJSON(t *testing.T) {
	p, d := simulated(t, enginesim.Config{}, enginesim.Config{})
	recorded, err := os.ReadFile("testdata/live.json")
	require.NoError(t, err)
	for command, args := range map[string]string{
		"render":  "-f " + documents + "2-lmcache.yaml",
		"check":   "testdata/compose.yaml",
		"verify":  "--connector nixl --probes 1 --model tiny --prefill " + p.URL() + " --decode " + d.URL(),
		"watch":   "--once --admin " + admin(t, 200, recorded),
		"conform": "--only wire/chat --timeout 5s --engines " + fourPorts(t) + " --url " + wrongGateway(t),
		"bench":   "--clients 1 --requests 1 --url " + p.URL(),

		"replay":   recordedDecisions + " --verify",
		"simulate": "--duration 1",
	} {
		_, out, _ := pdctl(t, "", append([]string{command, "--json"}, strings.Fields(args)...)...)
		var v any
		assert.NoError(t, json.Unmarshal([]byte(out), &v), "%s: %s", command, out)
	}
	code, out, errs := pdctl(t, "", "conform", "--list", "--json", "--only", "drain/exit")
	assert.Equal(t, exitOK, code, errs)
	assert.Contains(t, out, `"id": "drain/exit"`)
	code, _, errs = pdctl(t, "", "render", "--json", "--format", "compose", "-f", documents+"2-nixl.yaml")
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, errs, "--json is a form of its own")
}
