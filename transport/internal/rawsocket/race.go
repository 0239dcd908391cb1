// SPDX-License-Identifier: Apache-2.0

//go:build race && linux && (amd64 || arm64)

package rawsocket

import (
	"os"
	"syscall"
)

// The race detector learns from package syscall what goroutines write for each other through sockets: each write comes
// before the reads that follow. Raw system calls tell it nothing. So a call of package syscall that does nothing stands
// beside each of them.

var null = func() int {
	fd, err := syscall.Open(os.DevNull, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		panic(err) // in tests only, and nothing works without it
	}
	return fd
}()

func beforeWrite() { _, _ = syscall.Write(null, nil) }

func afterRead() { _, _ = syscall.Read(null, nil) }
