// SPDX-License-Identifier: Apache-2.0

// Package cpu reads from the kernel how much CPU time and memory a process uses, and sets on which CPU it runs. It
// needs Linux.
package cpu

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

// cpuMask is the kernel's CPU set; 16 words reach CPU 1023.
type cpuMask [16]uint64

// pinThread moves one thread (0: the calling one) to one CPU.
func pinThread(tid, cpu int) error {
	var mask cpuMask
	if cpu < 0 || cpu >= len(mask)*64 {
		return fmt.Errorf("CPU %d is out of range", cpu)
	}
	mask[cpu/64] = 1 << (cpu % 64)
	_, _, errno := syscall.RawSyscall(syscall.SYS_SCHED_SETAFFINITY, uintptr(tid),
		unsafe.Sizeof(mask), uintptr(unsafe.Pointer(&mask)))
	if errno != 0 {
		return fmt.Errorf("pin a thread to CPU %d: %w", cpu, errno)
	}
	return nil
}

// Allowed lists the CPUs that this process may run on.
func Allowed() ([]int, error) {
	var mask cpuMask
	_, _, errno := syscall.RawSyscall(syscall.SYS_SCHED_GETAFFINITY, 0,
		unsafe.Sizeof(mask), uintptr(unsafe.Pointer(&mask)))
	if errno != 0 {
		return nil, fmt.Errorf("ask for the allowed CPUs: %w", errno)
	}
	var list []int
	for cpu := range len(mask) * 64 {
		if mask[cpu/64]>>(cpu%64)&1 == 1 {
			list = append(list, cpu)
		}
	}
	return list, nil
}

// PinThread moves the calling thread to one CPU. Call runtime.LockOSThread before. A process that is started from this
// thread inherits the CPU, so no wrapper program is needed, whose start would be measured, too.
func PinThread(cpu int) error { return pinThread(0, cpu) }

// PinSelf moves every thread of this process to one CPU. Threads that are made later inherit it.
func PinSelf(cpu int) error {
	// Two passes: while the first one runs, a thread that is not moved yet can make another. The second one moves it.
	for range 2 {
		tasks, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return err
		}
		for _, task := range tasks {
			tid, err := strconv.Atoi(task.Name())
			if err != nil {
				return err
			}
			if err := pinThread(tid, cpu); err != nil && !errors.Is(err, syscall.ESRCH) {
				return err
			}
		}
	}
	return nil
}

// Used returns the CPU time, user and system, that all threads of a process have used since it started.
// The kernel's per-process clock has nanoseconds, where /proc/PID/stat has ticks of 10 ms.
func Used(pid int) (time.Duration, error) {
	// The clock's number is made from the PID as clock_getcpuclockid(3) makes it: ^pid<<3 | CPUCLOCK_SCHED.
	clock := int32(^pid)<<3 | 2
	var ts syscall.Timespec
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, uintptr(clock), uintptr(unsafe.Pointer(&ts)), 0)
	if errno != 0 {
		return 0, fmt.Errorf("CPU time of process %d: %w", pid, errno)
	}
	return time.Duration(ts.Nano()), nil
}
