// SPDX-License-Identifier: Apache-2.0

//go:build !linux

// Package cpu reads from the kernel how much CPU time and memory a process uses, and sets on which CPU it runs. It
// needs Linux.
package cpu

import (
	"errors"
	"time"
)

var errLinux = errors.New("the load benchmark needs Linux: it pins processes and reads their CPU clocks")

// Allowed is Linux only.
func Allowed() ([]int, error) { return nil, errLinux }

// PinThread is Linux only.
func PinThread(int) error { return errLinux }

// PinSelf is Linux only.
func PinSelf(int) error { return errLinux }

// Used is Linux only.
func Used(int) (time.Duration, error) { return 0, errLinux }
