// SPDX-License-Identifier: Apache-2.0

//go:build linux && !race

package transport

import (
	"syscall"
	"unsafe"
)

// rawRead reads a non-blocking file, and does not tell Go's scheduler.
func rawRead(fd uintptr, p []byte) (int, syscall.Errno) {
	return result(syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p))))
}

// rawWrite writes a non-blocking file, and does not tell Go's scheduler.
func rawWrite(fd uintptr, p []byte) (int, syscall.Errno) {
	return result(syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p))))
}

func result(n, _ uintptr, errno syscall.Errno) (int, syscall.Errno) {
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}
