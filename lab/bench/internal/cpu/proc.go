// SPDX-License-Identifier: Apache-2.0

package cpu

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of /proc/stat on every Linux that Go runs on (USER_HZ = 100).
const tick = 10 * time.Millisecond

// Share is how one CPU has spent its time since the machine started.
type Share struct {
	Busy  time.Duration // user, nice, system and interrupts
	Steal time.Duration // wanted, but given to another guest by the hypervisor
}

// Of reads a CPU's share from /proc/stat. The unit of 10 ms is enough to see that other processes used the CPU.
func Of(cpu int) (Share, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return Share{}, err
	}
	prefix := fmt.Sprintf("cpu%d ", cpu)
	for line := range strings.Lines(string(text)) {
		rest, found := strings.CutPrefix(line, prefix)
		if !found {
			continue
		}
		var n [8]int64 // user nice system idle iowait irq softirq steal
		for i, field := range strings.Fields(rest) {
			if i == len(n) {
				break
			}
			if n[i], err = strconv.ParseInt(field, 10, 64); err != nil {
				return Share{}, fmt.Errorf("/proc/stat: %w", err)
			}
		}
		return Share{
			Busy:  time.Duration(n[0]+n[1]+n[2]+n[5]+n[6]) * tick,
			Steal: time.Duration(n[7]) * tick,
		}, nil
	}
	return Share{}, fmt.Errorf("/proc/stat has no CPU %d", cpu)
}

// Resident returns the bytes of memory that a process has in RAM. It reads smaps_rollup, where the kernel counts page
// by page: the counters of /proc/PID/status may be old by some hundred KB per CPU.
func Resident(pid int) (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(text) {
		rest, found := bytes.CutPrefix(line, []byte("Rss:"))
		if !found {
			continue
		}
		fields := bytes.Fields(rest)
		if len(fields) != 2 || string(fields[1]) != "kB" {
			break
		}
		kb, err := strconv.ParseInt(string(fields[0]), 10, 64)
		return kb << 10, err
	}
	return 0, fmt.Errorf("memory of process %d: no Rss line", pid)
}
