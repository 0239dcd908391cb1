// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package conform

import "os/exec"

// Elsewhere there are no process groups: what a gateway has started itself lives on.
func ownGroup(*exec.Cmd) {}

func killGroup(cmd *exec.Cmd) { _ = cmd.Process.Kill() } // it may have ended
