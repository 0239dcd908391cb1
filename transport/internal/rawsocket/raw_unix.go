// SPDX-License-Identifier: Apache-2.0

//go:build unix && !(linux && (amd64 || arm64) && !msan && !asan)

package rawsocket

import "syscall"

// The sanitizers of memory and addresses learn from package syscall what was read. Other systems than Linux want system
// calls to be made by their C library, and other processors have other numbers for them.

func rawRead(fd uintptr, p []byte) (int, syscall.Errno) { return result(syscall.Read(int(fd), p)) }

func rawWrite(fd uintptr, p []byte) (int, syscall.Errno) { return result(syscall.Write(int(fd), p)) }

func rawPeek(fd uintptr, p []byte) (int, syscall.Errno) {
	n, _, err := syscall.Recvfrom(int(fd), p, syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	return result(n, err)
}

func result(n int, err error) (int, syscall.Errno) {
	errno, _ := err.(syscall.Errno) //nolint:errorlint // package syscall returns nothing else
	return max(n, 0), errno
}
