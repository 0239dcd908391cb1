// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"errors"
	"fmt"
	"strings"
)

// maxSettings bounds a configuration file; real ones have a few hundred bytes.
const maxSettings = 1 << 20

// readSettings reads a configuration file: JSON, or the plain YAML that LMCache's and vLLM's files are written in
// (mappings by indentation, lists, scalars, comments). A file with more than that (anchors, block scalars, tags) is an
// error: give it as JSON.
func readSettings(content []byte) (map[string]any, error) {
	if len(content) > maxSettings {
		return nil, errors.New("is too large")
	}
	if trimmed := strings.TrimSpace(string(content)); strings.HasPrefix(trimmed, "{") {
		v, err := decodeJSON(content)
		if m, ok := v.(map[string]any); ok && err == nil {
			return m, nil
		}
		return nil, errors.New("is not one JSON object")
	}
	p := &plainYAML{}
	for i, line := range strings.Split(string(content), "\n") {
		line = strings.TrimRight(stripComment(line), " \t\r")
		if line == "" || line == "---" || strings.HasPrefix(line, "%") {
			continue
		}
		body := strings.TrimLeft(line, " ")
		if strings.HasPrefix(body, "\t") {
			return nil, fmt.Errorf("line %d is indented with a tab", i+1)
		}
		p.lines = append(p.lines, plainLine{i + 1, len(line) - len(body), body})
	}
	if len(p.lines) == 0 {
		return map[string]any{}, nil
	}
	v, err := p.block(p.lines[0].indent, 0)
	if err != nil {
		return nil, err
	}
	m, ok := v.(map[string]any)
	if !ok || p.at < len(p.lines) {
		return nil, errors.New("is not one mapping")
	}
	return m, nil
}

type plainLine struct {
	number, indent int
	body           string
}

type plainYAML struct {
	lines []plainLine
	at    int
}

// block reads the mapping or list that starts at the current line.
func (p *plainYAML) block(indent, depth int) (any, error) {
	if depth > 20 {
		return nil, errors.New("is nested too deeply")
	}
	if body := p.lines[p.at].body; body == "-" || strings.HasPrefix(body, "- ") {
		return p.list(indent)
	}
	m := map[string]any{}
	for p.at < len(p.lines) && p.lines[p.at].indent == indent {
		line := p.lines[p.at]
		key, rest, err := member(line)
		if err != nil {
			return nil, err
		}
		p.at++
		if rest != "" {
			if m[key], err = scalar(line, rest); err != nil {
				return nil, err
			}
			continue
		}
		m[key] = nil
		if p.at == len(p.lines) {
			continue
		}
		next := p.lines[p.at]
		isList := next.indent == indent && (next.body == "-" || strings.HasPrefix(next.body, "- "))
		if next.indent > indent || isList {
			if m[key], err = p.block(next.indent, depth+1); err != nil {
				return nil, err
			}
		}
	}
	if p.at < len(p.lines) && p.lines[p.at].indent > indent {
		return nil, fmt.Errorf("line %d is indented too far", p.lines[p.at].number)
	}
	return m, nil
}

// list reads a list of scalars.
func (p *plainYAML) list(indent int) (any, error) {
	var list []any
	for p.at < len(p.lines) && p.lines[p.at].indent == indent {
		line := p.lines[p.at]
		item, ok := strings.CutPrefix(line.body, "-")
		if !ok {
			break
		}
		v, err := scalar(line, strings.TrimSpace(item))
		if err != nil {
			return nil, err
		}
		list = append(list, v)
		p.at++
	}
	return list, nil
}

// member splits "key: value".
func member(line plainLine) (key, rest string, err error) {
	key, rest, ok := strings.Cut(line.body, ":")
	if !ok || rest != "" && rest[0] != ' ' || key == "" || strings.ContainsAny(key[:1], "?[{&*!|>@`") {
		return "", "", fmt.Errorf("line %d is not KEY: VALUE", line.number)
	}
	return strings.Trim(strings.TrimSpace(key), `"'`), strings.TrimSpace(rest), nil
}

// scalar reads one value: quoted or plain text, a number, a switch, or a list or mapping in brackets.
func scalar(line plainLine, s string) (any, error) {
	switch {
	case s == "":
		return nil, nil
	case s[0] == '\'' && len(s) > 1 && s[len(s)-1] == '\'':
		return strings.ReplaceAll(s[1:len(s)-1], "''", "'"), nil
	case s[0] == '"' || s[0] == '{':
		v, err := decodeJSON([]byte(s))
		if err != nil {
			return nil, fmt.Errorf("line %d has a value that cannot be read", line.number)
		}
		return v, nil
	case s[0] == '[' && s[len(s)-1] == ']':
		if v, err := decodeJSON([]byte(s)); err == nil {
			return v, nil
		}
		list := []any{}
		for item := range strings.SplitSeq(s[1:len(s)-1], ",") {
			if item = strings.TrimSpace(item); item != "" {
				v, err := scalar(line, item)
				if err != nil {
					return nil, err
				}
				list = append(list, v)
			}
		}
		return list, nil
	case strings.ContainsAny(s[:1], "&*!|>@`%[]}'"), strings.HasPrefix(s, "- "), strings.Contains(s, ": "),
		strings.HasSuffix(s, ":"):
		return nil, fmt.Errorf("line %d has a value that cannot be read", line.number)
	}
	return plainValue(s), nil
}

// stripComment cuts a comment, which starts with # at the line's start or after a space, outside quotes.
func stripComment(line string) string {
	quote := byte(0)
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case quote != 0:
			if c == quote {
				quote = 0
			} else if c == '\\' && quote == '"' {
				i++
			}
		case c == '"' || c == '\'':
			if i == 0 || strings.IndexByte(" :[,{-", line[i-1]) >= 0 {
				quote = c
			}
		case c == '#' && (i == 0 || line[i-1] == ' ' || line[i-1] == '\t'):
			return line[:i]
		}
	}
	return line
}
