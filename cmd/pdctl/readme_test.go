// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/internal/cmdline"
)

// The README's commands run unchanged in the root of the repository, and print what the README says.
func TestTheCommandsOfThePageAreRun(t *testing.T) {
	page, err := os.ReadFile("README.md")
	require.NoError(t, err)
	t.Chdir("../..")
	lines := strings.Split(string(page), "\n")
	n := 0
	for i, line := range lines {
		line, isCommand := strings.CutPrefix(line, "    ")
		if !isCommand || !strings.HasPrefix(line, "go run ") {
			continue
		}
		n++
		out := ""
		for command := range strings.SplitSeq(line, " | ") {
			list := readScript(command).commands
			require.Len(t, list, 1, line)
			argv := list[0].argv
			require.Equal(t, []string{"go", "run", "./cmd/pdctl"}, argv[:3])
			var errs string
			_, out, errs = pdctl(t, out, argv[3:]...)
			require.Empty(t, errs, line)
			require.NotEmpty(t, out, line)
		}
		if len(lines) > i+2 && lines[i+2] == "```text" {
			end := slices.Index(lines[i+3:], "```")
			require.Positive(t, end)
			assert.Equal(t, strings.Join(lines[i+3:i+3+end], "\n")+"\n", out, line)
		}
	}
	assert.GreaterOrEqual(t, n, 8)
}

func TestThePageTellsEveryCommandAndFormat(t *testing.T) {
	page, err := os.ReadFile("README.md")
	require.NoError(t, err)
	for format := range endings {
		assert.Contains(t, string(page), "| `"+format+"` |")
	}
	code, help, _ := pdctl(t, "", "--help")
	assert.Equal(t, exitOK, code)
	for _, command := range []string{"render", "check", "verify", "watch", "conform", "bench", "simulate",
		"replay", "completion"} {
		assert.Contains(t, help, command)
		assert.Contains(t, string(page), "`pdctl "+command)
	}
	_, err = os.Stat(filepath.Join("flags", "README.md"))
	assert.NoError(t, err, "the page links to it")
}

// A bare pdctl shows what it can do, in place of an error alone. Nothing was asked for, so it exits as a wrong command
// line does, and standard output stays empty.
func TestWithoutACommandItPrintsTheUsage(t *testing.T) {
	code, out, errs := pdctl(t, "")
	assert.Equal(t, exitUsage, code)
	assert.Empty(t, out)
	assert.Contains(t, errs, "Usage: pdctl <command>")
	assert.Contains(t, errs, "pdctl render -f gateway.yaml")
}

func TestTheVersionIsTold(t *testing.T) {
	for _, flag := range []string{"--version", "-version"} {
		code, out, errs := pdctl(t, "", flag)
		assert.Equal(t, exitOK, code)
		assert.Equal(t, cmdline.Line("pdctl")+"\n", out)
		assert.Empty(t, errs)
	}
}
