// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/cmd/pdctl/flags"
	"github.com/pdkit/pdkit/cmd/pdctl/launch"
)

// launched is an engine, as an input starts it.
type launched struct {
	name string
	argv []string
	env  map[string]string
	node string                            // where it runs; "" if the input does not say
	home string                            // the input's machine, for engines without an address
	tag  string                            // the tag of its image
	read func(name string) ([]byte, error) // reads its files
}

// parse reads the engine's flags and the configuration files that they name. ok is false if it is no engine.
func (l launched) parse(version launch.Version) (e flags.Engine, ok bool, err error) {
	e, err = flags.Parse(l.argv, l.env, nil)
	if errors.Is(err, flags.ErrNoEngine) {
		return e, false, nil
	}
	if err == nil && len(e.Unread) > 0 && l.read != nil {
		files := map[string][]byte{}
		for _, name := range e.Unread {
			if content, readErr := l.read(name); readErr == nil {
				files[name] = content
			}
		}
		e, err = flags.Parse(l.argv, l.env, files)
	}
	if err != nil {
		return e, false, fmt.Errorf("%s: %w", l.name, err)
	}
	e.Name, e.Node, e.Version = l.name, cmp.Or(l.node, announced(e, l.env), l.home), version
	if v, tagErr := launch.ParseVersion(l.tag); tagErr == nil && version == (launch.Version{}) {
		e.Version = v
	}
	return e, true, nil
}

// announced returns the host that an engine gives as its own.
func announced(e flags.Engine, env map[string]string) string {
	for _, host := range []string{e.Host, env["VLLM_HOST_IP"], env["VLLM_NIXL_SIDE_CHANNEL_HOST"],
		env["VLLM_P2P_SIDE_CHANNEL_HOST"]} {
		if host != "" && host != "0.0.0.0" && host != "::" && host != "localhost" && !strings.HasPrefix(host, "127.") &&
			host != "::1" {
			return host
		}
	}
	return ""
}

// readInput reads a shell script, a Compose file, Kubernetes manifests or the Python that render writes. It recognizes
// them by their content.
func readInput(file string, data []byte) ([]launched, error) {
	if isPython(file, string(data)) {
		return readPython(file, string(data))
	}
	docs, faults := readYAML(file, data)
	has := func(is func(d map[string]any) bool) bool { return slices.ContainsFunc(docs, is) }
	var list []launched
	switch {
	case has(func(d map[string]any) bool { return mapAt(d, "services") != nil && textAt(d, "kind") == "" }):
		list = readCompose(file, docs)
	case has(func(d map[string]any) bool { return textAt(d, "kind") != "" }):
		list = readKubernetes(docs)
	case len(docs) > 0 && len(faults) == 0 && slices.Contains([]string{".yaml", ".yml"}, filepath.Ext(file)):
		return nil, fmt.Errorf("%s: neither a Compose file nor Kubernetes manifests", file)
	default:
		return readCommands(file, string(data)), nil
	}
	if len(faults) > 0 {
		return nil, faults.Sorted()
	}
	return list, nil
}

// readCommands reads a shell script, or a command line.
func readCommands(file, text string) []launched {
	s := readScript(text)
	var list []launched
	for _, c := range s.commands {
		l := launched{name: fmt.Sprintf("%s:%d", filepath.Base(file), c.line), argv: c.argv, env: c.env, home: file,
			read: s.reader(func(name string) ([]byte, error) { return beside(file, name) })}
		if c.label != "" && c.label != "*" {
			// A script that runs one of several programs may do so on several machines.
			l.name = c.label
			if !slices.ContainsFunc(c.argv, func(a string) bool { return a == "127.0.0.1" || a == "localhost" }) {
				l.home = ""
			}
		}
		list = append(list, l.container(file)...)
	}
	return list
}

// reader reads the files that a script writes, and others as otherwise does.
func (s script) reader(otherwise func(name string) ([]byte, error)) func(name string) ([]byte, error) {
	return func(name string) ([]byte, error) {
		if content, ok := s.files[name]; ok {
			return content, nil
		}
		return otherwise(name)
	}
}

// beside reads a file with an absolute name, or a name relative to another file.
func beside(file, name string) ([]byte, error) {
	if !filepath.IsAbs(name) {
		name = filepath.Join(filepath.Dir(file), name)
	}
	return readFile(name, nil)
}

// readCompose reads the services of a Compose file.
func readCompose(file string, docs []map[string]any) []launched {
	var list []launched
	for _, doc := range docs {
		for _, name := range slices.Sorted(maps.Keys(mapAt(doc, "services"))) {
			service := mapAt(doc, "services", name)
			image := composeText(textAt(service, "image"))
			l := launched{name: name, env: composeEnv(file, service), tag: tagOf(image), node: name}
			if textAt(service, "network_mode") == "host" {
				l.node, l.home = "", file
			}
			entry, isGiven := composeWords(at(service, "entrypoint"))
			command, _ := composeWords(at(service, "command"))
			l.argv = withEntrypoint(image, entry, isGiven, command)
			l.read = func(path string) ([]byte, error) { return composeFile(file, doc, service, path) }
			list = append(list, l.unwrap()...)
		}
	}
	return list
}

// withEntrypoint puts the image's own entry point before a command if none is given.
func withEntrypoint(image string, entry []string, given bool, command []string) []string {
	name, _, _ := strings.Cut(filepath.Base(image), ":")
	if !given && strings.Contains(name, "vllm-openai") && (len(command) == 0 || command[0] != "vllm") {
		entry = []string{"vllm", "serve"}
	}
	return slices.Concat(entry, command)
}

func tagOf(image string) string {
	_, tag, _ := strings.Cut(filepath.Base(image), ":")
	return tag
}

// unwrap reads the script of `sh -c SCRIPT`.
func (l launched) unwrap() []launched {
	i := shellText(l.argv)
	if i == 0 {
		return []launched{l}
	}
	s := readScriptIn(l.argv[i], l.env)
	var list []launched
	for _, c := range s.commands {
		inner := l
		inner.argv, inner.env, inner.read = c.argv, c.env, s.reader(l.read)
		list = append(list, inner)
	}
	return list
}

// composeText replaces Compose's $$. The variables of the caller's environment are not known, so each has its default.
func composeText(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '$' || i+1 == len(s) {
			b.WriteByte(s[i])
			continue
		}
		if s[i+1] == '$' {
			b.WriteByte('$')
			i++
			continue
		}
		inner := newShell(s[i:])
		value, ok := inner.expansion()
		if !ok {
			b.WriteByte('$')
			continue
		}
		b.WriteString(value)
		i += inner.pos - 1
	}
	return b.String()
}

// composeWords reads a command: a list, or a text that is split as a shell splits it.
func composeWords(v any) (words []string, given bool) {
	switch v := v.(type) {
	case []any:
		for _, item := range v {
			words = append(words, composeText(textAt(map[string]any{"": item}, "")))
		}
		return words, true
	case string:
		s := newShell(strings.ReplaceAll(composeText(v), "\n", " "))
		for s.pos < len(s.text) {
			s.skipBlanks()
			s.word()
		}
		for _, w := range s.words {
			words = append(words, w.text)
		}
		return words, true
	}
	return nil, false
}

func composeEnv(file string, service map[string]any) map[string]string {
	env := map[string]string{}
	files := listAt(service, "env_file")
	if name := textAt(service, "env_file"); name != "" {
		files = []any{name}
	}
	for _, name := range files {
		content, err := beside(file, fmt.Sprint(name))
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(content)) {
			if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(key, "#") {
				env[key] = strings.Trim(value, `"'`)
			}
		}
	}
	for _, item := range listAt(service, "environment") {
		if key, value, ok := strings.Cut(fmt.Sprint(item), "="); ok {
			env[key] = composeText(value)
		}
	}
	for key, value := range textsAt(service, "environment") {
		env[key] = composeText(value)
	}
	return env
}

// composeFile finds a container's file among its configs and bind mounts.
func composeFile(file string, doc, service map[string]any, path string) ([]byte, error) {
	for _, item := range listAt(service, "configs") {
		source := cmp.Or(textAt(item, "source"), fmt.Sprint(item))
		if cmp.Or(textAt(item, "target"), "/"+source) != path {
			continue
		}
		if content := textAt(doc, "configs", source, "content"); content != "" {
			return []byte(composeText(content)), nil
		}
		return beside(file, textAt(doc, "configs", source, "file"))
	}
	for _, item := range listAt(service, "volumes") {
		host, target := textAt(item, "source"), textAt(item, "target")
		if text, ok := item.(string); ok {
			host, target, _ = strings.Cut(text, ":")
			target, _, _ = strings.Cut(target, ":")
		}
		if target == "" {
			continue
		}
		if rest, ok := strings.CutPrefix(path, target); ok && (rest == "" || rest[0] == '/') {
			return beside(file, host+rest)
		}
	}
	return nil, os.ErrNotExist
}
