// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The program as a process of its own: its exit codes, and what real signals do.
func TestExitCodesAndSignalsOfAProcess(t *testing.T) {
	t.Parallel()
	p, d := newEngine(t), newEngine(t)
	yaml := gatewayYAML("") + pairYAML("m", p, d, "")
	good := write(t, yaml)
	bad := write(t, strings.Replace(pairYAML("m", p, d, ""), "spec:", "spce:", 1))

	for name, c := range map[string]struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		"check of a good file": {[]string{"-config", good, "-check"}, 0, "well formed", ""},
		"check of a wrong one": {[]string{"-config", bad, "-check"}, 2, "",
			": spce: unknown field; did you mean spec?"},
		"start of a wrong one": {[]string{"-config", bad}, 2, "", ": spce: unknown field; did you mean spec?"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr strings.Builder
			cmd := command(t, c.args...)
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			_ = cmd.Run()
			assert.Equal(t, c.code, cmd.ProcessState.ExitCode())
			assert.Contains(t, stdout.String(), c.stdout)
			assert.Contains(t, stderr.String(), c.stderr)
		})
	}
	for _, sig := range []os.Signal{syscall.SIGTERM, os.Interrupt} {
		t.Run(sig.String(), func(t *testing.T) {
			g, cmd := startProcess(t, yaml, nil)
			status, _, _ := g.complete(completion)
			assert.Equal(t, http.StatusOK, status)
			require.NoError(t, cmd.Process.Signal(sig))
			require.NoError(t, cmd.Wait(), "exit code 0 after a drain")
			assert.Contains(t, g.log.String(), "drained")
		})
	}
}
