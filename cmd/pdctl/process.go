// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/cmd/pdctl/flags"
)

// readProcess reads a running process below proc, which is /proc. The environment stays in memory: pdctl keeps only
// what the rules need (see package flags) and prints nothing of it.
func readProcess(proc string, pid int) (launched, error) {
	dir := filepath.Join(proc, strconv.Itoa(pid))
	argv, err := zeroTerminated(filepath.Join(dir, "cmdline"))
	if err != nil {
		return launched{}, fmt.Errorf("process %d cannot be read: is it running, and yours?", pid)
	}
	environ, err := zeroTerminated(filepath.Join(dir, "environ"))
	if err != nil {
		return launched{}, fmt.Errorf("the environment of process %d cannot be read: is it yours?", pid)
	}
	l := launched{name: fmt.Sprintf("pid %d", pid), argv: argv, env: map[string]string{}, node: "this machine",
		read: func(name string) ([]byte, error) {
			if filepath.IsAbs(name) { // the process may have a container's root
				return readFile(filepath.Join(dir, "root", name), nil)
			}
			return readFile(filepath.Join(dir, "cwd", name), nil)
		}}
	for _, entry := range environ {
		if name, value, ok := strings.Cut(entry, "="); ok {
			l.env[name] = value
		}
	}
	return l, nil
}

func zeroTerminated(file string) ([]string, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	text := strings.TrimSuffix(string(data), "\x00")
	if text == "" {
		return nil, nil
	}
	return strings.Split(text, "\x00"), nil
}

// localEngines finds the engines that the user runs on this machine. It leaves out an engine's own workers, which may
// have the same command line.
func localEngines(proc string, uid int) ([]int, error) {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, fmt.Errorf("--all-local needs %s: %w", proc, err)
	}
	command := map[int]string{}
	parent := map[int]int{}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		owner, ppid := status(filepath.Join(proc, entry.Name(), "status"))
		argv, err := zeroTerminated(filepath.Join(proc, entry.Name(), "cmdline"))
		if err != nil || owner != uid || shellText(argv) > 0 {
			continue
		}
		if _, err := flags.Parse(argv, nil, nil); err == nil {
			command[pid], parent[pid] = strings.Join(argv, "\x00"), ppid
		}
	}
	var pids []int
	for pid := range command {
		if _, ofEngine := command[parent[pid]]; !ofEngine {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids, nil
}

// status returns the owner and the parent of a process, or -1 if it cannot read them.
func status(file string) (uid, ppid int) {
	uid, ppid = -1, -1
	data, err := os.ReadFile(file)
	if err != nil {
		return uid, ppid
	}
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		n, err := strconv.Atoi(fields[1])
		if err != nil {
			continue
		}
		switch fields[0] {
		case "Uid:":
			uid = n
		case "PPid:":
			ppid = n
		}
	}
	return uid, ppid
}
