// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"syscall"
	"time"
	"unsafe"
)

// threadTime is the time for which this thread has had a processor.
func threadTime() time.Duration {
	const threadClock = 3 // CLOCK_THREAD_CPUTIME_ID of time.h
	var t syscall.Timespec
	_, _, _ = syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, threadClock, uintptr(unsafe.Pointer(&t)), 0)
	return time.Duration(t.Nano())
}
