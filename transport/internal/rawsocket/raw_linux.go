// SPDX-License-Identifier: Apache-2.0

//go:build linux && (amd64 || arm64) && !msan && !asan

package rawsocket

import (
	"syscall"
	"unsafe"
)

// What follows does not tell Go's scheduler of the calls, so they must not block, whatever flags others have set on the
// socket: hence MSG_DONTWAIT.

func rawRead(fd uintptr, p []byte) (int, syscall.Errno) {
	n, err := result(syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)),
		syscall.MSG_DONTWAIT, 0, 0))
	afterRead()
	return n, err
}

func rawPeek(fd uintptr, p []byte) (int, syscall.Errno) {
	return result(syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)),
		syscall.MSG_DONTWAIT|syscall.MSG_PEEK, 0, 0))
}

func rawWrite(fd uintptr, p []byte) (int, syscall.Errno) {
	beforeWrite()
	return result(syscall.RawSyscall6(syscall.SYS_SENDTO, fd, uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)),
		syscall.MSG_DONTWAIT|syscall.MSG_NOSIGNAL, 0, 0))
}

func result(n, _ uintptr, errno syscall.Errno) (int, syscall.Errno) {
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}
