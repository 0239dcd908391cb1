// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// installed returns the path of a program that step servers of test.sh installs. Without it the test is skipped.
func installed(t *testing.T, name string) string {
	t.Helper()
	program, err := exec.LookPath(name)
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("cmd/gateway/live/install.sh has not been run: ", err)
		}
		t.Skip(name + " is not installed: run cmd/gateway/live/install.sh")
	}
	return program
}

// tmuxTerminal is a terminal in which a shell runs a command.
type tmuxTerminal struct {
	t      *testing.T
	socket string
}

func newTerminal(t *testing.T, columns, rows int, command string) *tmuxTerminal {
	t.Helper()
	x := &tmuxTerminal{t, filepath.Join(t.TempDir(), "tmux")}
	out, err := x.tmux("new-session", "-d", "-x", strconv.Itoa(columns), "-y", strconv.Itoa(rows), command)
	require.NoError(t, err, out)
	t.Cleanup(func() { _, _ = x.tmux("kill-server") })
	return x
}

func (x *tmuxTerminal) tmux(args ...string) (string, error) {
	cmd := exec.Command(installed(x.t, "tmux"), append([]string{"-u", "-f", "/dev/null", "-S", x.socket}, args...)...)
	cmd.Env = append(os.Environ(), "PDCTL_TEST_AS_PROGRAM=1", "SHELL=/bin/sh", "TERM=xterm-256color", "TMUX=")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// screen waits until a screen is ready, and returns it with its colours. A line that the terminal wrapped is one.
func (x *tmuxTerminal) screen(ready func(string) bool) (screen string) {
	x.t.Helper()
	for range 150 {
		out, err := x.tmux("capture-pane", "-e", "-p", "-J")
		if err == nil && ready(out) {
			return out
		}
		screen = out
		time.Sleep(200 * time.Millisecond)
	}
	require.Fail(x.t, "the terminal does not show what it should", "%s", screen)
	return ""
}
