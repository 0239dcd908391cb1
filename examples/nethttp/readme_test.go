// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The README is tested: its program compiles, and CI runs its commands.

func readme(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	return string(b)
}

func TestTheProgramInTheReadmeCompiles(t *testing.T) {
	_, rest, found := strings.Cut(readme(t), "```go\n")
	require.True(t, found)
	program, _, found := strings.Cut(rest, "```\n")
	require.True(t, found)
	require.LessOrEqual(t, strings.Count(program[strings.Index(program, "func main"):], "\n"), 20)

	dir := t.TempDir()
	file := filepath.Join(dir, "main.go")
	require.NoError(t, os.WriteFile(file, []byte(program), 0o600))
	here, err := os.Getwd()
	require.NoError(t, err)
	replace := map[string]string{filepath.Join(here, "readme", "main.go"): file}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	cmd := exec.CommandContext(t.Context(), "go", "build", "-overlay", filepath.Join(dir, "overlay.json"),
		"-o", filepath.Join(dir, "program"), "./readme")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// commands says what runs each command of the README.
var commands = map[string]func(t *testing.T){
	"go run ./examples/quickstart": inTestScript("./examples/quickstart"),
	"./test.sh":                    func(t *testing.T) { contains(t, "../../.ci/run", "./test.sh") },
	"lab/engines/prove.sh -verify": inTestScript("lab/engines/prove.sh -verify"),
	"go run ./cmd/pdctl render -f cmd/gateway/testdata/documents/2-nixl.yaml": func(t *testing.T) {
		contains(t, "../../cmd/pdctl/README.md", "render -f cmd/gateway/testdata/documents/2-nixl.yaml")
	},
	"go run ./cmd/pdctl check -f cmd/gateway/testdata/documents/4-lmcache.yaml " +
		"cmd/pdctl/testdata/kthena-1069.yaml": func(t *testing.T) {
		contains(t, "../../cmd/pdctl/README.md", "kthena-1069.yaml") // whose commands are run there
	},
	"go run ./cmd/gateway -check -config cmd/gateway/testdata/check.yaml": func(t *testing.T) {
		cmd := exec.CommandContext(t.Context(), "go", "run", "./cmd/gateway", "-check", "-config",
			"cmd/gateway/testdata/check.yaml")
		cmd.Dir = "../.."
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	},
	// A rehearsal of a release gets each module and installs the programs, see RELEASING.md.
	"go get github.com/pdkit/pdkit": func(t *testing.T) {
		contains(t, "../../internal/tools/release/rehearse.go", `"get", m.path`)
	},
	"go install github.com/pdkit/pdkit/cmd/gateway@latest": installed("gateway"),
	"go install github.com/pdkit/pdkit/cmd/pdctl@latest":   installed("pdctl"),
	"go install github.com/pdkit/pdkit/cmd/sidecar@latest": installed("sidecar"),
}

func installed(program string) func(*testing.T) {
	return func(t *testing.T) { contains(t, "../../internal/tools/release/rehearse.go", `cmd/`+program+`"`) }
}

func inTestScript(part string) func(*testing.T) {
	return func(t *testing.T) { contains(t, "../../test.sh", part) }
}

func contains(t *testing.T, file, part string) {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(b), part)
}

func TestTheCommandsInTheReadmeAreRun(t *testing.T) {
	n := 0
	inBlock := false
	for line := range strings.Lines(readme(t)) {
		if strings.HasPrefix(line, "```") {
			inBlock = !inBlock
		}
		command, isCommand := strings.CutPrefix(strings.TrimRight(line, "\n"), "    ")
		if inBlock || !isCommand {
			continue
		}
		n++
		run, known := commands[command]
		require.True(t, known, "nobody runs this command of the README: %s", command)
		run(t)
	}
	require.Equal(t, len(commands), n)
}
