// SPDX-License-Identifier: Apache-2.0

package cpu

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// UsedByTree returns the CPU time of a process and of the descendants that run now. A program with a launcher in
// another language may do its work in a child.
func UsedByTree(pid int) (time.Duration, error) {
	return sum(pid, Used)
}

// ResidentOfTree returns the bytes of memory that a process and its descendants have in RAM. Pages that they share
// count for each.
func ResidentOfTree(pid int) (int64, error) {
	return sum(pid, Resident)
}

func sum[N time.Duration | int64](pid int, of func(pid int) (N, error)) (N, error) {
	total, err := of(pid)
	if err != nil {
		return 0, err
	}
	for _, child := range children(pid) {
		// A child may have ended since it was listed.
		if n, err := sum(child, of); err == nil {
			total += n
		}
	}
	return total, nil
}

// children lists the processes that the threads of a process have started. A kernel without such lists, or a thread
// that has ended, gives none.
func children(pid int) []int {
	tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	var list []int
	for _, task := range tasks {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task.Name()))
		for field := range strings.FieldsSeq(string(text)) {
			if child, err := strconv.Atoi(field); err == nil {
				list = append(list, child)
			}
		}
	}
	return list
}
