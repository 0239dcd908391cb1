// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/lab/internal/proc"
)

// process is a server that this program runs: an engine, a program beside engines, or the gateway.
type process struct {
	*proc.Process
	url    string
	config string // a gateway's file
}

// ready waits until GET url answers 200.
func (p *process) ready(ctx context.Context, url string) error {
	return p.Until(ctx, 100*time.Millisecond, func() bool { return answersOK(ctx, url) })
}

func answersOK(ctx context.Context, url string) bool {
	_, err := get(ctx, url, 2*time.Second)
	return err == nil
}

// terminate sends SIGTERM to the process alone and not to its children, as a container runtime does.
func (p *process) terminate() error { return p.Cmd.Process.Signal(syscall.SIGTERM) }

func (p *process) stop() { p.Stop(8 * time.Second) }
