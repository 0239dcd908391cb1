// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"maps"
	"path"
	"slices"
	"strings"
)

// switches are the options of `docker run` that take no value.
var switches = []string{"--rm", "-d", "--detach", "-i", "--interactive", "-t", "--tty", "-it", "-ti", "-dit", "-itd",
	"--privileged", "--init", "--read-only", "-P", "--publish-all", "--no-healthcheck", "-q", "--quiet"}

// container reads `docker run`, with which people most often start engines by hand: the engine's command is what
// follows the image, its variables are -e options, and its files are mounted.
func (l launched) container(file string) []launched {
	start := -1
	for i, a := range l.argv {
		if base := path.Base(a); (base == "docker" || base == "podman" || base == "nerdctl") && i+1 < len(l.argv) {
			start = i + 1
			break
		}
	}
	if start < 0 {
		return []launched{l}
	}
	rest := l.argv[start:]
	if rest[0] == "container" {
		rest = rest[1:]
	}
	if len(rest) == 0 || rest[0] != "run" {
		return []launched{l}
	}
	outer := l.env
	l.env = map[string]string{}
	service := map[string]any{}
	var volumes []any
	var entry []string
	network, name := "", ""
	i := 1
	for ; i < len(rest) && strings.HasPrefix(rest[i], "-"); i++ {
		option, value, given := strings.Cut(rest[i], "=")
		if slices.Contains(switches, option) {
			continue
		}
		if !given && i+1 < len(rest) {
			i++
			value = rest[i]
		}
		switch option {
		case "-e", "--env":
			key, v, given := strings.Cut(value, "=")
			if !given {
				v = outer[key]
			}
			l.env[key] = v
		case "--env-file":
			maps.Copy(l.env, composeEnv(file, map[string]any{"env_file": value}))
		case "-v", "--volume":
			volumes = append(volumes, value)
		case "--network", "--net":
			network = value
		case "--name":
			name = value
		case "--entrypoint":
			entry = []string{value}
		}
	}
	if i >= len(rest) {
		return []launched{l}
	}
	service["volumes"] = volumes
	l.argv = withEntrypoint(rest[i], entry, entry != nil, rest[i+1:])
	l.tag = tagOf(rest[i])
	l.read = func(name string) ([]byte, error) { return composeFile(file, nil, service, name) }
	if network != "host" { // the container has a network of its own
		l.node = cmp.Or(name, l.name)
	}
	return l.unwrap()
}
