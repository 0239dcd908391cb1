// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"runtime"
	"strings"
	"time"
)

// machine describes the machine and the time of the measurement.
type machine struct {
	model, kernel, golang, date string
	cores                       int
}

func thisMachine() machine {
	m := machine{
		model:  "unknown CPU",
		kernel: "unknown kernel",
		golang: runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH,
		date:   time.Now().UTC().Format(time.DateOnly),
		cores:  runtime.NumCPU(),
	}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
				m.model = strings.TrimSpace(value)
				break
			}
		}
	}
	if text, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.kernel = "Linux " + strings.TrimSpace(string(text))
	}
	return m
}
