// SPDX-License-Identifier: Apache-2.0

package cpu

import (
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTheClockOfAProcessSeesWhatItBurns(t *testing.T) {
	before, err := Used(os.Getpid())
	require.NoError(t, err)
	const burn = 50 * time.Millisecond
	for used := before; used-before < burn; {
		used, err = Used(os.Getpid())
		require.NoError(t, err)
	}
	after, err := Used(os.Getpid())
	require.NoError(t, err)
	assert.GreaterOrEqual(t, after-before, burn)
	assert.Less(t, after-before, 100*burn)
	_, err = Used(1<<22 + 1) // beyond the kernel's greatest PID
	assert.Error(t, err)
}

func TestAPinnedThreadStaysOnItsCPU(t *testing.T) {
	done := make(chan []int)
	cpus, err := Allowed()
	require.NoError(t, err)
	go func() {
		// The thread is not unlocked, so the runtime ends it with this goroutine.
		runtime.LockOSThread()
		var now []int
		if assert.NoError(t, PinThread(cpus[len(cpus)-1])) {
			now, err = Allowed()
			assert.NoError(t, err)
		}
		done <- now
	}()
	assert.Equal(t, []int{cpus[len(cpus)-1]}, <-done)
}

func TestTheShareOfACPUAndTheMemoryOfAProcessAreRead(t *testing.T) {
	cpus, err := Allowed()
	require.NoError(t, err)
	share, err := Of(cpus[0])
	require.NoError(t, err)
	assert.Positive(t, share.Busy)
	_, err = Of(1 << 20)
	require.Error(t, err)

	resident, err := Resident(os.Getpid())
	require.NoError(t, err)
	assert.Greater(t, resident, int64(1<<20))
	_, err = Resident(1 << 30)
	assert.Error(t, err)
}

func TestTheCPUTimeAndMemoryOfChildrenCount(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sh", "-c", "(while :; do :; done) & wait")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	defer func() {
		assert.NoError(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)) // the child, too
		assert.Error(t, cmd.Wait())
	}()
	const burn = 50 * time.Millisecond
	require.Eventually(t, func() bool {
		used, err := UsedByTree(cmd.Process.Pid)
		return assert.NoError(t, err) && used > burn
	}, 20*time.Second, 10*time.Millisecond)
	alone, err := Used(cmd.Process.Pid)
	require.NoError(t, err)
	assert.Less(t, alone, burn)
	one, err := Resident(cmd.Process.Pid)
	require.NoError(t, err)
	both, err := ResidentOfTree(cmd.Process.Pid)
	require.NoError(t, err)
	assert.Greater(t, both, one)
}
