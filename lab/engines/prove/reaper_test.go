// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// startFamily starts a shell with a child in the same group, as an engine is.
func startFamily(t *testing.T) *process {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "sleep 60 & wait")
	p, err := startProcess(cmd, "family", "", filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	t.Cleanup(p.stop)
	return p
}

func TestEnginesDoNotOutliveTheProgram(t *testing.T) {
	r, err := startReaper()
	require.NoError(t, err)
	families := []*process{startFamily(t), startFamily(t)}
	for _, p := range families {
		require.NoError(t, r.watch(p))
	}
	require.NoError(t, r.groups.Close(), "what the kernel does when the program is killed")
	for _, p := range families {
		select {
		case <-p.done:
			assert.ErrorContains(t, p.err, "signal: killed")
		case <-time.After(20 * time.Second):
			assert.Fail(t, "still alive")
		}
	}
	require.NoError(t, r.cmd.Wait())
}

func TestReaperSparesEnginesOfAProgramThatEndsWell(t *testing.T) {
	r, err := startReaper()
	require.NoError(t, err)
	p := startFamily(t)
	require.NoError(t, r.watch(p))
	r.close()
	assert.False(t, p.ended())
	p.stop()
	assert.ErrorContains(t, p.err, "signal: terminated", "a stop asks first")
}
