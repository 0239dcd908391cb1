// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import (
	"net/netip"
	"os/exec"
	"time"
)

type (
	wire struct{}
	host struct{ addr netip.Addr }
	rule struct {
		cut           bool
		lose          float64
		delay, jitter time.Duration
	}
)

const wirePrefix = "10.77.0."

func inNamespace() error                           { return errNoNamespace }
func newWire() (*wire, error)                      { return nil, errNoNamespace }
func (*wire) host(int) (*host, error)              { return nil, errNoNamespace }
func (*host) start(*exec.Cmd) error                { return errNoNamespace }
func (*wire) between(netip.Addr, netip.Addr, rule) {}
func (*wire) close()                               {}
