// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package kubetest

import "os/exec"

// endWithParent: only Linux has it.
func endWithParent(*exec.Cmd) {}
