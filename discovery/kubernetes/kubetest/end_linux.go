// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"os/exec"
	"syscall"
)

// endWithParent makes the kernel end cmd when this process is killed, or ends by the test runner's timeout, since
// nothing else would clean up then.
func endWithParent(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
