// SPDX-License-Identifier: Apache-2.0

//go:build linux && race

package transport

import "syscall"

// The race detector learns from package syscall what goroutines write for each other through sockets. Of raw system
// calls it would learn nothing, and take that for races.

func rawRead(fd uintptr, p []byte) (int, syscall.Errno) { return result(syscall.Read(int(fd), p)) }

func rawWrite(fd uintptr, p []byte) (int, syscall.Errno) { return result(syscall.Write(int(fd), p)) }

func result(n int, err error) (int, syscall.Errno) {
	errno, _ := err.(syscall.Errno) //nolint:errorlint // package syscall returns nothing else
	return max(n, 0), errno
}
