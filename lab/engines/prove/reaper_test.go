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

	"github.com/pdkit/pdkit/lab/internal/proc"
)

// startFamily starts a shell with a child in the same group, as an engine is.
func startFamily(t *testing.T) *process {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "sleep 60 & wait")
	p, err := proc.Start(cmd, "family", filepath.Join(t.TempDir(), "log"), (*exec.Cmd).Start)
	require.NoError(t, err)
	family := &process{Process: p}
	t.Cleanup(family.stop)
	return family
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
		case <-p.Done:
			assert.ErrorContains(t, p.Err, "signal: killed")
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
	assert.False(t, p.Ended())
	p.stop()
	assert.ErrorContains(t, p.Err, "signal: terminated", "a stop asks first")
}
