// SPDX-License-Identifier: Apache-2.0

//go:build unix

package conform

import (
	"os/exec"
	"syscall"
)

// ownGroup gives a command that is not started yet a process group of its own.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// killGroup ends a command with all that it has started.
func killGroup(cmd *exec.Cmd) { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // the group may have ended
