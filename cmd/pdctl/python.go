// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// pythonEngines begins what readPython looks for: an engine's function, its variables, a file, and the constructor.
var pythonEngines = regexp.MustCompile(
	`(?m)^def (\w+)\(\):$|^ +(environ)\(|^ +(Path)\(|^ +return (LLM|Engine)\(`)

// isPython reports whether a text is a module that the form python of render writes.
func isPython(file, text string) bool {
	return filepath.Ext(file) == ".py" || strings.Contains(text, "\nENGINES = {\n")
}

// readPython reads the form python of render. An engine that Python makes has no address, and its constructor's
// arguments are those of a command line.
func readPython(file, text string) ([]launched, error) {
	var list []launched
	l, files := launched{}, map[string][]byte{}
	for at := 0; at < len(text); {
		m := pythonEngines.FindStringSubmatchIndex(text[at:])
		if m == nil {
			break
		}
		from := at
		at += m[1]
		if m[2] >= 0 {
			own := map[string][]byte{}
			files, l = own, launched{
				name: strings.ReplaceAll(text[from+m[2]:from+m[3]], "_", "-"), env: map[string]string{},
				read: func(name string) ([]byte, error) {
					if content, ok := own[name]; ok {
						return content, nil
					}
					return nil, os.ErrNotExist
				},
			}
			if i := strings.Index(text[at:], "\n\n\n"); i > 0 && strings.Contains(text[at:at+i], "127.0.0.1") {
				l.home = file // as in a script
			}
			continue
		}
		p := &pythonReader{text: text, pos: at - 1}
		var err error
		switch {
		case m[4] >= 0:
			err = p.environ(l.env)
		case m[6] >= 0:
			err = p.file(files)
		default:
			if l.argv, err = p.engine(text[from+m[8] : from+m[9]]); err == nil {
				list = append(list, l)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", file, 1+strings.Count(text[:p.pos], "\n"), err)
		}
		at = p.pos
	}
	return list, nil
}

// pythonReader reads literals: texts, numbers, True, False, None, lists, dictionaries, and calls with named arguments.
type pythonReader struct {
	text string
	pos  int
}

// argument is a named argument of a call.
type argument struct {
	name  string
	value any
}

func (p *pythonReader) environ(env map[string]string) error {
	args, err := p.arguments(0)
	if err != nil || len(args) == 0 {
		return err
	}
	wanted, _ := args[0].value.(map[string]any)
	for name, v := range wanted {
		env[name] = fmt.Sprint(v)
	}
	return nil
}

// file reads Path(NAME).write_text(CONTENT, …).
func (p *pythonReader) file(files map[string][]byte) error {
	name, err := p.arguments(0)
	if err != nil {
		return err
	}
	p.accept(".write_text")
	content, err := p.arguments(0)
	if err == nil && len(name) > 0 && len(content) > 0 {
		files[fmt.Sprint(name[0].value)] = []byte(fmt.Sprint(content[0].value))
	}
	return err
}

// engine returns the command line with the arguments of a constructor.
func (p *pythonReader) engine(constructor string) ([]string, error) {
	args, err := p.arguments(0)
	argv := []string{"vllm", "serve"}
	if constructor == "Engine" {
		argv = []string{"python3", "-m", "sglang.launch_server"}
	}
	for _, a := range args {
		flag := "--" + strings.ReplaceAll(a.name, "_", "-")
		switch v := a.value.(type) {
		case bool:
			if !v {
				flag = "--no-" + flag[2:]
			}
			argv = append(argv, flag)
		case string:
			if v == "" {
				argv = append(argv, flag+"=")
				continue
			}
			argv = append(argv, flag, v)
		default:
			raw, err := json.Marshal(v)
			if err != nil {
				return nil, err
			}
			argv = append(argv, flag, string(raw))
		}
	}
	return argv, err
}

// accept skips blanks and comments, and then the text if it is next.
func (p *pythonReader) accept(text string) bool {
	for p.pos < len(p.text) {
		if c := p.text[p.pos]; c == '#' {
			p.pos += strings.IndexByte(p.text[p.pos:]+"\n", '\n')
		} else if c == ' ' || c == '\n' {
			p.pos++
		} else {
			break
		}
	}
	if !strings.HasPrefix(p.text[p.pos:], text) {
		return false
	}
	p.pos += len(text)
	return true
}

var (
	pythonName   = regexp.MustCompile(`^(\w+)=`)
	pythonString = regexp.MustCompile(`^"(?:[^"\\\n]|\\.)*"`)
	pythonNumber = regexp.MustCompile(`^-?[0-9][0-9.eE+-]*`)
	pythonCall   = regexp.MustCompile(`^[A-Za-z]\w*`)
)

// errPython says that a module is not as render writes it.
type errPython struct{ want string }

func (e errPython) Error() string {
	return "is not as `pdctl render --format python` writes it: want " + e.want
}

func (p *pythonReader) arguments(depth int) ([]argument, error) {
	if !p.accept("(") {
		return nil, errPython{"("}
	}
	var list []argument
	err := p.until(")", func() (err error) {
		a := argument{}
		if m := pythonName.FindStringSubmatch(p.text[p.pos:]); m != nil {
			a.name = m[1]
			p.pos += len(m[0])
		}
		a.value, err = p.value(depth + 1)
		list = append(list, a)
		return err
	})
	return list, err
}

// until reads items, with commas between them, up to the closing bracket.
func (p *pythonReader) until(closing string, item func() error) error {
	for !p.accept(closing) {
		if err := item(); err != nil {
			return err
		}
		if !p.accept(",") && !strings.HasPrefix(p.text[p.pos:], closing) {
			return errPython{", or " + closing}
		}
	}
	return nil
}

// pythonDepth bounds lists in lists.
const pythonDepth = 100

func (p *pythonReader) value(depth int) (any, error) {
	if depth > pythonDepth {
		return nil, errPython{"fewer values in values"}
	}
	p.accept("")
	rest := p.text[p.pos:]
	switch {
	case p.accept("True"):
		return true, nil
	case p.accept("False"):
		return false, nil
	case p.accept("None"):
		return nil, nil
	case p.accept("["):
		list := []any{}
		err := p.until("]", func() error {
			v, err := p.value(depth + 1)
			list = append(list, v)
			return err
		})
		return list, err
	case p.accept("{"):
		members := map[string]any{}
		err := p.until("}", func() error {
			key, err := p.value(depth + 1)
			if err == nil && !p.accept(":") {
				err = errPython{":"}
			}
			if err != nil {
				return err
			}
			members[fmt.Sprint(key)], err = p.value(depth + 1)
			return err
		})
		return members, err
	}
	if s := pythonString.FindString(rest); s != "" {
		p.pos += len(s)
		text, err := strconv.Unquote(s)
		if err != nil {
			return nil, errPython{"a text"}
		}
		return text, nil
	}
	if s := pythonNumber.FindString(rest); s != "" && json.Valid([]byte(s)) {
		p.pos += len(s)
		return json.Number(s), nil
	}
	if s := pythonCall.FindString(rest); s != "" {
		p.pos += len(s)
		args, err := p.arguments(depth)
		members := map[string]any{}
		for _, a := range args {
			members[a.name] = a.value
		}
		return members, err
	}
	return nil, errPython{"a value"}
}
