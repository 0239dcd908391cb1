// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// quoted writes a text as a double-quoted scalar. Go's escapes for ASCII are a subset of those of YAML 1.2 and of
// Python.
func quoted(s string) string { return strconv.QuoteToASCII(s) }

// scalar writes a text as YAML: in single quotes where double quotes would need escapes, as JSON does.
func scalar(s string) string {
	printable := !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
	if printable && strings.ContainsAny(s, `"\\`) {
		return "'" + strings.ReplaceAll(s, "'", "''") + "'"
	}
	return quoted(s)
}

// yamlList writes a list of texts, one a line.
func yamlList(b *bytes.Buffer, indent, key string, items []string) {
	if len(items) == 0 {
		return
	}
	fmt.Fprintf(b, "%s%s:\n", indent, key)
	for _, item := range items {
		fmt.Fprintf(b, "%s  - %s\n", indent, scalar(item))
	}
}

// yamlMap writes a mapping of texts in the order given.
func yamlMap(b *bytes.Buffer, indent, key string, members []EnvVar) {
	if len(members) == 0 {
		return
	}
	fmt.Fprintf(b, "%s%s:\n", indent, key)
	for _, m := range members {
		fmt.Fprintf(b, "%s  %s: %s\n", indent, scalar(m.Name), scalar(m.Value))
	}
}

// yamlText writes a text of several lines as a block where YAML keeps it as it is, and in quotes elsewhere.
func yamlText(b *bytes.Buffer, indent, key, text string) {
	if !asBlock(text) {
		fmt.Fprintf(b, "%s%s: %s\n", indent, key, scalar(text))
		return
	}
	fmt.Fprintf(b, "%s%s: |\n", indent, key)
	for line := range strings.Lines(text) {
		if line != "\n" {
			line = indent + "  " + line
		}
		b.WriteString(line)
	}
}

// asBlock reports whether a text survives a block scalar: printable, ended by one line break, its first line not
// indented.
func asBlock(text string) bool {
	if text == "" || strings.TrimLeft(text, " \n") != text || !strings.HasSuffix(text, "\n") ||
		strings.HasSuffix(text, "\n\n") {
		return false
	}
	for _, r := range text {
		if r != '\n' && (r < ' ' || r > '~') {
			return false
		}
	}
	for line := range strings.Lines(text) {
		if strings.TrimSpace(line) == "" && line != "\n" {
			return false
		}
	}
	return true
}

// escapeDollars doubles each dollar sign: Compose and Kubernetes both replace variables in commands and environments,
// and read two dollar signs as one.
func escapeDollars(s string) string { return strings.ReplaceAll(s, "$", "$$") }

// each returns a list with each text changed.
func each(list []string, change func(string) string) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = change(s)
	}
	return out
}
