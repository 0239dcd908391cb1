// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"flag"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

func readme(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("README.md")
	require.NoError(t, err)
	return string(b)
}

// The README's commands run unchanged, except for the ports, with the sidecar as a process of its own. It serves, and
// SIGTERM ends it with 0.
func TestTheCommandsInTheReadmeAreRun(t *testing.T) {
	t.Parallel()
	commands := regexp.MustCompile("(?s)```sh\n(.*?)\n```").FindAllStringSubmatch(readme(t), -1)
	require.Len(t, commands, 2)
	first := ports(t, 1)
	p, d := twoEngines(t, enginesim.Config{}, enginesim.Config{})
	free := strings.NewReplacer("8000", strconv.Itoa(first), "8100", portOf(t, p.URL()), "8200", portOf(t, d.URL()))
	serve, found := strings.CutPrefix(free.Replace(commands[0][1]), "go run ./cmd/sidecar ")
	require.True(t, found)

	log := &sharedtest.Log{}
	cmd := command(t.Context(), t, strings.Fields(serve)...)
	cmd.Stderr = log
	require.NoError(t, cmd.Start())
	require.Eventually(t, func() bool { return servingLine.MatchString(log.String()) }, 20*time.Second,
		time.Millisecond, "%s", log)

	response := request(t, free.Replace(commands[1][1]))
	assert.NotEmpty(t, text(response), response)
	assert.Len(t, p.Requests(), 1)
	assert.Len(t, d.Requests(), 1)
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), "%s", log)
}

// request does what a curl command does: in a shell if curl is installed, otherwise with the same request in Go.
func request(t *testing.T, command string) string {
	t.Helper()
	if _, err := exec.LookPath("curl"); err == nil {
		out, err := exec.CommandContext(t.Context(), "sh", "-c", command).Output()
		require.NoError(t, err)
		return string(out)
	}
	parts := regexp.MustCompile(`^curl -s (\S+) -H '([^:]+): (.*?)' -H '([^:]+): (.*?)' -d '(.*)'$`).
		FindStringSubmatch(command)
	require.Len(t, parts, 7)
	status, _, response := ask(t, http.DefaultClient, http.MethodPost, parts[1], parts[6], parts[2:6]...)
	require.Equal(t, http.StatusOK, status)
	return response
}

// The README has every flag, and every flag in its tables exists.
func TestTheReadmeHasAllFlags(t *testing.T) {
	var usage bytes.Buffer
	_, err := parseFlags([]string{"-h"}, noEnv, &usage)
	require.ErrorIs(t, err, flag.ErrHelp)
	defined := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^  -([a-z0-9-]+)`).FindAllStringSubmatch(usage.String(), -1) {
		defined[m[1]] = true
	}
	require.Greater(t, len(defined), 40)
	named := map[string]bool{}
	for line := range strings.Lines(readme(t)) {
		if strings.HasPrefix(line, "|") {
			for _, m := range regexp.MustCompile("`--([a-z0-9-]+)`").FindAllStringSubmatch(line, -1) {
				named[m[1]] = true
				assert.True(t, defined[m[1]], "the README has --%s, which is no flag", m[1])
			}
		}
	}
	for name := range defined {
		assert.True(t, named[name], "the README lacks --%s", name)
	}
}
