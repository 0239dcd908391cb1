// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestMain is pdctl itself where a test starts the test binary as that.
func TestMain(m *testing.M) {
	if os.Getenv("PDCTL_TEST_AS_PROGRAM") != "" {
		main()
	}
	os.Exit(m.Run())
}

// asked are the words that a shell gets for a command line.
func asked(t *testing.T, line string) []string {
	t.Helper()
	t.Setenv("COMP_LINE", line)
	code, out, errs := pdctl(t, "")
	require.Equal(t, exitOK, code, errs)
	return strings.Fields(out)
}

func TestCompletionKnowsCommandsFlagsAndValues(t *testing.T) {
	assert.ElementsMatch(t, []string{"conform", "completion"}, asked(t, "pdctl co"))
	assert.Equal(t, []string{"--probes"}, asked(t, "pdctl verify --model tiny --pro"))
	assert.ElementsMatch(t, []string{"auto", "always", "never"}, asked(t, "pdctl watch --color "))
	assert.ElementsMatch(t, []string{"bash", "zsh", "fish"}, asked(t, "pdctl completion "))
	assert.Contains(t, asked(t, "pdctl check --"), "--all-local")
}

// A shell reads the script, and asks the program that the script names as it asks any. The folder has a space and a
// quote in its name.
func TestShellsRunTheScript(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	program := filepath.Join(t.TempDir(), "it's here", "pdctl")
	require.NoError(t, os.Mkdir(filepath.Dir(program), 0o750))
	if os.Link(self, program) != nil { // another file system
		binary, err := os.ReadFile(self)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(program, binary, 0o700))
	}
	for shell, script := range map[string]string{
		// complete -p prints what the shell has kept. With "complete -C COMMAND" bash runs COMMAND with the command
		// line in COMP_LINE.
		"bash": `set -e; eval "$("$1" completion bash)"; kept=$(complete -p pdctl); eval "set -- $kept"
			while [ "$1" != -C ]; do shift; done
			COMP_LINE="pdctl watch --on" eval "$2 pdctl --on watch"`,
		"zsh": `eval "$("$1" completion zsh)" && COMP_LINE="pdctl watch --on" && export COMP_LINE && "$1"`,
	} {
		t.Run(shell, func(t *testing.T) {
			binary, err := exec.LookPath(shell)
			if err != nil {
				t.Skip(shell + " is not installed")
			}
			cmd := exec.CommandContext(t.Context(), binary, "-c", script, shell, program)
			cmd.Env = append(os.Environ(), "PDCTL_TEST_AS_PROGRAM=1")
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			assert.Equal(t, "--once\n", string(out))
		})
	}
	t.Run("fish", func(t *testing.T) {
		binary, err := exec.LookPath("fish")
		if err != nil {
			t.Skip("fish is not installed")
		}
		cmd := exec.CommandContext(t.Context(), binary, "--no-config", "-c",
			`$argv[1] completion fish | source; complete -C "pdctl watch --on"`, program)
		cmd.Env = append(os.Environ(), "PDCTL_TEST_AS_PROGRAM=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		assert.Contains(t, string(out), "--once")
	})
}

// What a user sees who types in a terminal and presses the tabulator.
func TestTheTabulatorCompletes(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	dir := t.TempDir()
	require.NoError(t, os.Symlink(self, filepath.Join(dir, "pdctl")))
	for shell, c := range map[string]struct{ start, load string }{
		"bash": {"bash --norc --noprofile -i", "source <(pdctl completion bash)"},
		"zsh":  {"zsh -f -i", "source <(pdctl completion zsh)"},
		"fish": {"fish --no-config -i", "pdctl completion fish | source"},
	} {
		t.Run(shell, func(t *testing.T) {
			installed(t, "tmux")
			installed(t, shell)
			// At home a shell would write its history after the test has ended.
			x := newTerminal(t, 80, 24, "HOME=/dev/null PATH="+quote(dir)+":$PATH exec "+c.start)
			press := func(text, key string) {
				out, err := x.tmux("send-keys", "-l", "--", text)
				require.NoError(t, err, out)
				out, err = x.tmux("send-keys", key)
				require.NoError(t, err, out)
			}
			press(c.load+"; echo load''ed", "Enter")
			x.screen(func(screen string) bool { return strings.Contains(screen, "loaded") })
			for _, typed := range [][2]string{{"pdctl wat", "pdctl watch "}, {"--on", "pdctl watch --once "},
				{"--color al", "pdctl watch --once --color always"}, {"; pdctl check -f READ", "check -f README.md"}} {
				press(typed[0], "Tab")
				x.screen(func(screen string) bool {
					return strings.Contains(colourCodes.ReplaceAllString(screen, ""), typed[1])
				})
			}
		})
	}
}

func TestCompletionRefusesOtherShells(t *testing.T) {
	code, out, errs := pdctl(t, "", "completion", "tcsh")
	assert.Equal(t, exitUsage, code)
	assert.Empty(t, out)
	assert.Contains(t, errs, `must be one of "bash","zsh","fish"`)
}
