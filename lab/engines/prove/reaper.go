// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"os/exec"
	"syscall"
)

// reaper is a shell that kills the engines if this program is killed and cannot stop them. The children of a vLLM
// engine continue without their parents, with 1 GB of memory each.
type reaper struct {
	cmd    *exec.Cmd
	groups io.WriteCloser // receives one process group a line; it ends when this program ends
}

func startReaper() (*reaper, error) {
	r := &reaper{cmd: exec.CommandContext(context.Background(), "sh", "-c",
		`while read -r group; do groups="$groups -$group"; done; kill -s KILL -- $groups`)}
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // it must outlive an interrupt from the terminal
	var err error
	if r.groups, err = r.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	return r, r.cmd.Start()
}

func (r *reaper) watch(p *process) error {
	_, err := fmt.Fprintln(r.groups, p.Cmd.Process.Pid)
	return err
}

// close ends the reaper without killing anything.
func (r *reaper) close() {
	_ = r.cmd.Process.Kill()
	_ = r.cmd.Wait()
}
