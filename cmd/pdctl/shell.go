// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
)

// script is what a shell script starts and writes, as far as that can be known without running it. Variables that the
// script sets are replaced. Commands inside $( ) are not run and count as empty.
type script struct {
	commands []command
	files    map[string][]byte // the files that here-documents write
}

// command is one simple command.
type command struct {
	argv  []string
	env   map[string]string
	line  int
	label string // the pattern of the surrounding case branch
}

// readScript reads a shell script or a command line.
func readScript(text string) script {
	return readScriptIn(text, nil)
}

// readScriptIn is readScript with exported variables.
func readScriptIn(text string, env map[string]string) script {
	s := newShell(text)
	maps.Copy(s.vars, env)
	maps.Copy(s.exported, env)
	s.run()
	return s.out
}

func newShell(text string) *shell {
	return &shell{text: text, line: 1, vars: map[string]string{}, exported: map[string]string{},
		out: script{files: map[string][]byte{}}}
}

// shell is the state of reading a script.
type shell struct {
	text     string
	pos      int
	line     int
	vars     map[string]string
	exported map[string]string
	depth    int // how many sh -c surround this script

	words    []word
	start    int    // the line of the first word
	target   string // the file of > in this command
	heredocs []*heredoc
	body     *heredoc

	label  string
	saved  []scope // one for each case that is open
	inCase bool    // the next word may be a pattern
	out    script
}

type scope struct{ vars, exported map[string]string }

// word is one word after expansion. An unquoted variable may become several words.
type word struct {
	text   string
	quoted bool // a part was quoted, so it is neither a keyword nor the name in an assignment
}

type heredoc struct {
	end     string
	literal bool
	text    string
}

func (s *shell) run() {
	for s.pos < len(s.text) {
		switch c := s.text[s.pos]; c {
		case ' ', '\t', '\r':
			s.pos++
		case '\\':
			if strings.HasPrefix(s.text[s.pos:], "\\\n") {
				s.pos += 2
				s.line++
				continue
			}
			s.word()
		case '#':
			for s.pos < len(s.text) && s.text[s.pos] != '\n' {
				s.pos++
			}
		case '\n':
			s.pos++
			s.line++
			s.readHeredocs()
			s.end()
		case ';', '&', '|', '(', ')':
			s.operator(c)
		case '<', '>':
			s.redirection(c)
		default:
			s.word()
		}
	}
	s.end()
}

// operator ends a command. In a case, ) after one word ends a pattern, and ;; ends a branch.
func (s *shell) operator(c byte) {
	s.pos++
	double := s.pos < len(s.text) && s.text[s.pos] == c
	if c == ')' && !s.inCase && len(s.words) > 0 && s.words[0].text == "case" { // case $x in a)
		s.end()
	}
	switch {
	case c == ')' && s.inCase && len(s.words) > 0:
		var pattern []string
		for _, w := range s.words {
			pattern = append(pattern, w.text)
		}
		s.label, s.words, s.inCase = strings.Join(pattern, " "), nil, false
	case c == '|' && s.inCase: // a|b) is one pattern
	case c == ';' && double:
		s.pos++
		s.end()
		s.inCase = true
		if n := len(s.saved); n > 0 {
			s.vars, s.exported = maps.Clone(s.saved[n-1].vars), maps.Clone(s.saved[n-1].exported)
		}
	case c == '&' && s.pos < len(s.text) && s.text[s.pos] == '>': // &> FILE
	default:
		if double {
			s.pos++
		}
		s.end()
	}
}

// redirection reads < > >> << <<- 2>&1. The word after it is not an argument.
func (s *shell) redirection(c byte) {
	s.pos++
	if n := len(s.words); n > 0 && !s.words[n-1].quoted && isDigits(s.words[n-1].text) && s.pos >= 2 &&
		s.text[s.pos-2] != ' ' {
		s.words = s.words[:n-1] // removes the 2 of 2>
	}
	rest := s.text[s.pos:]
	if c == '<' && strings.HasPrefix(rest, "<") && !strings.HasPrefix(rest, "<<") {
		s.pos++
		if strings.HasPrefix(s.text[s.pos:], "-") {
			s.pos++
		}
		s.skipBlanks()
		from := s.pos
		words := s.scan()
		if len(words) > 0 {
			s.body = &heredoc{end: words[0].text, literal: strings.ContainsAny(s.text[from:s.pos], `'"\`)}
			s.heredocs = append(s.heredocs, s.body)
		}
		return
	}
	for s.pos < len(s.text) && strings.IndexByte(">&<", s.text[s.pos]) >= 0 {
		s.pos++
	}
	s.skipBlanks()
	if words := s.scan(); len(words) > 0 && c == '>' {
		s.target = words[0].text
	}
}

func (s *shell) skipBlanks() {
	for s.pos < len(s.text) && (s.text[s.pos] == ' ' || s.text[s.pos] == '\t') {
		s.pos++
	}
}

func (s *shell) word() {
	if len(s.words) == 0 {
		s.start = s.line
	}
	before := s.pos
	s.words = append(s.words, s.scan()...)
	if s.pos == before { // always moves on
		s.pos++
	}
}

// scan reads one word and expands it.
func (s *shell) scan() []word {
	var parts []word
	var cur strings.Builder
	quoted, started := false, false
	flush := func() {
		if started {
			parts = append(parts, word{cur.String(), quoted})
		}
		cur.Reset()
		started = false
	}
	for s.pos < len(s.text) {
		switch c := s.text[s.pos]; {
		case strings.IndexByte(" \t\r\n;&|()<>", c) >= 0:
			flush()
			return parts
		case c == '\'':
			end := strings.IndexByte(s.text[s.pos+1:], '\'')
			if end < 0 {
				end = len(s.text) - s.pos - 1
			}
			body := s.text[s.pos+1 : s.pos+1+end]
			cur.WriteString(body)
			s.line += strings.Count(body, "\n")
			s.pos = min(s.pos+end+2, len(s.text))
			quoted, started = true, true
		case c == '"':
			s.pos++
			if text, nothing := s.doubleQuoted(); !nothing {
				cur.WriteString(text)
				started = true
			}
			quoted = true
		case c == '\\':
			if strings.HasPrefix(s.text[s.pos:], "\\\n") {
				s.line++
			} else if s.pos+1 < len(s.text) {
				cur.WriteByte(s.text[s.pos+1])
				quoted, started = true, true
			}
			s.pos = min(s.pos+2, len(s.text))
		case c == '$' || c == '`':
			value, ok := s.expansion()
			if !ok {
				cur.WriteByte(c)
				started = true
				continue
			}
			for i, field := range strings.Fields(value) {
				if i > 0 {
					flush()
				}
				cur.WriteString(field)
				started = true
			}
		default:
			cur.WriteByte(c)
			started = true
			s.pos++
		}
	}
	flush()
	return parts
}

// doubleQuoted reads up to the closing quote. nothing is true for "$@" if there are no arguments: it is then no word at
// all.
func (s *shell) doubleQuoted() (text string, nothing bool) {
	from := s.pos
	var b strings.Builder
	for s.pos < len(s.text) && s.text[s.pos] != '"' {
		switch c := s.text[s.pos]; c {
		case '\\':
			if s.pos+1 < len(s.text) {
				next := s.text[s.pos+1]
				if next == '\n' {
					s.line++
				} else {
					if strings.IndexByte("$`\"\\", next) < 0 {
						b.WriteByte('\\')
					}
					b.WriteByte(next)
				}
			}
			s.pos = min(s.pos+2, len(s.text))
		case '$', '`':
			value, ok := s.expansion()
			if !ok {
				b.WriteByte(c)
			}
			b.WriteString(value)
		default:
			if c == '\n' {
				s.line++
			}
			b.WriteByte(c)
			s.pos++
		}
	}
	nothing = s.text[from:s.pos] == "$@"
	s.pos = min(s.pos+1, len(s.text))
	return b.String(), nothing
}

var variable = regexp.MustCompile(
	`^\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(?:(:?[-+=?])([^}]*))?\}|([@*#?$!0-9-]))`,
)

// expansion reads $NAME, ${NAME}, ${NAME:-DEFAULT}, $1, $( ) or ` `. ok is false for a literal dollar sign.
func (s *shell) expansion() (string, bool) {
	rest := s.text[s.pos:]
	switch {
	case strings.HasPrefix(rest, "$("):
		depth := 0
		for i, c := range rest {
			switch c {
			case '(':
				depth++
			case ')':
				if depth--; depth == 0 {
					s.pos += i + 1
					return "", true
				}
			}
		}
		s.pos = len(s.text)
		return "", true
	case rest[0] == '`':
		end := strings.IndexByte(rest[1:], '`')
		if end < 0 {
			s.pos = len(s.text)
		} else {
			s.pos += end + 2
		}
		return "", true
	}
	m := variable.FindStringSubmatch(rest)
	if m == nil {
		s.pos++
		return "", false
	}
	s.pos += len(m[0])
	name := m[1] + m[2]
	value, set := s.vars[name]
	if !set {
		value, set = s.exported[name]
	}
	switch {
	case (m[3] == ":-" || m[3] == ":=") && value == "", (m[3] == "-" || m[3] == "=") && !set, m[3] == "+" && set,
		m[3] == ":+" && value != "":
		return strings.Trim(m[4], `"'`), true
	case strings.HasSuffix(m[3], "+"):
		return "", true
	}
	return value, true
}

// readHeredocs reads the bodies of the here-documents that this line began.
func (s *shell) readHeredocs() {
	for _, h := range s.heredocs {
		var b strings.Builder
		for s.pos < len(s.text) {
			line, _, more := strings.Cut(s.text[s.pos:], "\n")
			s.pos = min(s.pos+len(line)+1, len(s.text))
			s.line++
			if strings.TrimLeft(line, "\t") == h.end {
				break
			}
			b.WriteString(line)
			if more {
				b.WriteByte('\n')
			}
		}
		h.text = b.String()
		if !h.literal {
			h.text = s.expandText(h.text)
		}
	}
	s.heredocs = nil
}

func (s *shell) expandText(text string) string {
	inner := &shell{text: text + `"`, vars: s.vars, exported: s.exported, out: script{files: map[string][]byte{}}}
	out, _ := inner.doubleQuoted()
	return out
}

var (
	keywords = []string{"if", "then", "else", "elif", "fi", "do", "done", "while", "until", "for", "{", "}", "!",
		"time", "exec", "nohup", "command", "sudo"}
	assignment = regexp.MustCompile(`^([A-Za-z_][A-Za-z0-9_]*)\+?=`)
)

// end ends the command that was read.
func (s *shell) end() {
	words, target, body := s.words, s.target, s.body
	s.words, s.target, s.body = nil, "", nil
	for len(words) > 0 && !words[0].quoted && slices.Contains(keywords, words[0].text) {
		words = words[1:]
	}
	if len(words) > 0 && !words[0].quoted && words[0].text == "case" {
		s.saved = append(s.saved, scope{maps.Clone(s.vars), maps.Clone(s.exported)})
		s.inCase = true
		if n := slices.IndexFunc(words, func(w word) bool { return w.text == "in" }); n >= 0 {
			s.words = words[n+1:]
		}
		return
	}
	if len(words) > 0 && !words[0].quoted && words[0].text == "esac" {
		s.saved = s.saved[:max(len(s.saved)-1, 0)]
		s.inCase, s.label = false, ""
		return
	}
	local := map[string]string{}
	words = s.assign(words, local)
	if len(words) == 0 {
		maps.Copy(s.vars, local)
		for name, value := range local {
			if _, exported := s.exported[name]; exported {
				s.exported[name] = value
			}
		}
		return
	}
	env := maps.Clone(s.exported)
	switch words[0].text {
	case "export", "declare", "readonly", "local", "typeset":
		for _, w := range words[1:] {
			name, value, given := strings.Cut(w.text, "=")
			if !given {
				value = s.vars[name]
			}
			s.vars[name] = value
			if words[0].text == "export" || words[0].text == "declare" {
				s.exported[name] = value
			}
		}
		return
	case "env":
		words = words[1:]
		for len(words) > 0 && strings.HasPrefix(words[0].text, "-") {
			switch words[0].text {
			case "-i", "-", "--ignore-environment":
				env = map[string]string{}
			case "-u", "-C":
				if words = words[1:]; len(words) > 0 {
					delete(env, words[0].text)
				}
			}
			words = words[min(1, len(words)):]
		}
		words = s.assign(words, local)
	}
	s.finish(words, env, local, target, body)
}

// assign removes the NAME=VALUE words at the front and sets them.
func (s *shell) assign(words []word, into map[string]string) []word {
	for len(words) > 0 {
		name := assignment.FindStringSubmatch(words[0].text)
		if name == nil {
			break
		}
		into[name[1]] = words[0].text[len(name[0]):]
		words = words[1:]
	}
	return words
}

// finish keeps a command. env are the variables that were exported before it, local those in front of it.
func (s *shell) finish(words []word, env, local map[string]string, target string, body *heredoc) {
	if len(words) == 0 {
		return
	}
	argv := make([]string, len(words))
	for i, w := range words {
		argv[i] = w.text
	}
	if body != nil {
		if argv[0] == "tee" && len(argv) > 1 {
			target = argv[len(argv)-1]
		}
		if target != "" {
			s.out.files[target] = []byte(body.text)
		}
	}
	maps.Copy(env, local)
	if i := shellText(argv); i > 0 && s.depth < 5 {
		inner := &shell{text: argv[i], line: s.start, vars: maps.Clone(s.vars), exported: env, depth: s.depth + 1,
			label: s.label, out: script{files: s.out.files}}
		maps.Copy(inner.vars, local)
		inner.run()
		s.out.commands = append(s.out.commands, inner.out.commands...)
		return
	}
	s.out.commands = append(s.out.commands, command{argv: argv, env: env, line: s.start, label: s.label})
}

// shellText returns the index of the script in `bash -c SCRIPT`, also after whatever starts the shell; 0 if there is
// none.
func shellText(argv []string) int {
	for i, a := range argv {
		if !slices.Contains([]string{"sh", "bash", "dash", "zsh"}, path.Base(a)) {
			continue
		}
		for j := i + 1; j+1 < len(argv) && strings.HasPrefix(argv[j], "-"); j++ {
			if strings.Contains(argv[j], "c") && !strings.HasPrefix(argv[j], "--") {
				return j + 1
			}
		}
	}
	return 0
}

func isDigits(s string) bool {
	return s != "" && strings.Trim(s, "0123456789") == ""
}
