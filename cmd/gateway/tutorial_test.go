// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// The commands of docs/tutorial.md are run in their order. Simulated engines stand in for those of engine.sh, and all
// have other ports than the page's. What steps of test.sh run (quickstart, prove.sh), or tests
// of its own (images), must only be there.
func TestTheTutorial(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"curl", "bash"} {
		if _, err := exec.LookPath(program); err != nil && os.Getenv("CI") != "true" {
			t.Skip(program, " is not installed")
		}
	}
	data, err := os.ReadFile("../../docs/tutorial.md")
	require.NoError(t, err)
	page, dir := string(data), t.TempDir()
	p, d, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	ports := strings.NewReplacer("http://127.0.0.1:8100", p.URL(), "http://127.0.0.1:8200", d.URL())
	_, config, found := strings.Cut(page, "<!-- tutorial.yaml -->\n```yaml\n")
	require.True(t, found)
	config, _, _ = strings.Cut(config, "```")
	file := filepath.Join(dir, "tutorial.yaml")
	require.NoError(t, os.WriteFile(file, []byte(ports.Replace(config)), 0o600))

	var g *program
	for _, m := range regexp.MustCompile("(?s)```sh\n(.*?)\n```").FindAllStringSubmatch(page, -1) {
		command := m[1]
		switch {
		case strings.HasPrefix(command, "go run ./examples/quickstart"),
			strings.HasPrefix(command, "lab/engines/"),
			strings.HasPrefix(command, "go run ./cmd/images "):
			_, err := os.Stat(filepath.Join("../..", regexp.MustCompile(`(cmd|examples|lab)/\S+`).FindString(command)))
			assert.NoError(t, err)
			continue
		case command == "go run ./cmd/gateway -config tutorial.yaml -inspect 1s":
			g = start(t, ports.Replace(config), "-inspect", "1s", "-listen", "127.0.0.1:0", "-admin", "127.0.0.1:0")
			ports = strings.NewReplacer("http://127.0.0.1:8000", g.client, "http://127.0.0.1:9000", g.admin)
			continue
		}
		command = strings.ReplaceAll(command, "tutorial.yaml", file)
		command = ports.Replace(command)
		cmd := exec.CommandContext(t.Context(), "bash", "-ec", command)
		cmd.Dir = "../.."
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s\n%s", m[1], out)
		for begin, want := range map[string]string{"curl -i": "X-Pd-Mode: disaggregated", "curl -N": "[DONE]",
			"curl -s": `"phase": "ready"`, "go run ./cmd/pdctl verify": "reused"} {
			if strings.HasPrefix(command, begin) {
				assert.Contains(t, string(out), want, "%s", m[1])
			}
		}
	}
	require.NotNil(t, g, "the page starts a gateway")
}
