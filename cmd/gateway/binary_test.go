// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The program as it is built: its exit codes, and what real signals do.
func TestTheBuiltProgram(t *testing.T) {
	program := filepath.Join(t.TempDir(), "gateway")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput()
	require.NoError(t, err, "%s", out)
	p, d := newEngine(t), newEngine(t)
	good := write(t, gatewayYAML("")+pairYAML("m", p, d, ""))
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
		"no file":              {nil, 2, "", "-config FILE is missing"},
		"help":                 {[]string{"-h"}, 0, "", "-log-level"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr strings.Builder
			cmd := exec.CommandContext(t.Context(), program, c.args...)
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			_ = cmd.Run()
			assert.Equal(t, c.code, cmd.ProcessState.ExitCode())
			assert.Contains(t, stdout.String(), c.stdout)
			assert.Contains(t, stderr.String(), c.stderr)
		})
	}
	for _, sig := range []os.Signal{syscall.SIGTERM, os.Interrupt} {
		t.Run(sig.String(), func(t *testing.T) {
			log := &logBuffer{}
			cmd := exec.CommandContext(t.Context(), program, "-config", good)
			cmd.Stderr = log
			require.NoError(t, cmd.Start())
			require.Eventually(t, func() bool { return servingLine.MatchString(log.String()) }, 20*time.Second,
				time.Millisecond, "%s", log)
			status, _, _ := do(t, http.MethodPost, "http://"+servingLine.FindStringSubmatch(log.String())[1]+
				"/v1/completions", completion)
			assert.Equal(t, http.StatusOK, status)
			require.NoError(t, cmd.Process.Signal(sig))
			require.NoError(t, cmd.Wait(), "exit code 0 after a drain")
			assert.Contains(t, log.String(), "drained")
		})
	}
}
