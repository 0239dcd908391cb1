// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
)

// Shell writes a POSIX shell script that starts one program by name: `sh FILE prefill-0`. The script adds further
// arguments to the engine's, and writes configuration files to the working directory.
func (p *Plan) Shell() []byte {
	processes := p.processes()
	names := make([]string, len(processes))
	for i, pr := range processes {
		names[i] = pr.name
	}

	var b bytes.Buffer
	fmt.Fprintf(&b, "#!/bin/sh\n# The engines of %s. Each line starts one of them, with further arguments if there "+
		"are any:\n", comment(p.Name))
	for _, n := range names {
		fmt.Fprintf(&b, "#   sh FILE %s\n", n)
	}
	writeComments(&b, "", noteLines(p.Notes))
	b.WriteString("set -eu\nname=${1:-}\n[ $# -eq 0 ] || shift\ncase $name in\n")
	for _, pr := range processes {
		fmt.Fprintf(&b, "%s)\n", pr.name)
		writeComments(&b, "  ", noteLines(pr.notes))
		for _, f := range pr.files {
			end := delimiter(f.Content)
			fmt.Fprintf(&b, "  cat > %s <<'%s'\n%s", shellQuote(f.Name), end, f.Content)
			if !strings.HasSuffix(f.Content, "\n") {
				b.WriteString("\n")
			}
			b.WriteString(end + "\n")
		}
		b.WriteString("  exec")
		if len(pr.env) > 0 {
			b.WriteString(" env")
			for _, e := range pr.env {
				fmt.Fprintf(&b, " \\\n    %s=%s", e.Name, shellQuote(e.Value))
			}
			b.WriteString(" \\\n   ")
		}
		for i, a := range pr.argv {
			if i > 0 && strings.HasPrefix(a, "--") {
				b.WriteString(" \\\n   ")
			}
			b.WriteString(" " + shellQuote(a))
		}
		b.WriteString(" \"$@\"\n  ;;\n")
	}
	fmt.Fprintf(&b, "*)\n  echo 'usage: sh FILE %s' >&2\n  exit 2\n  ;;\nesac\n", strings.Join(names, "|"))
	return b.Bytes()
}

// processes are the programs of a plan on one machine, companions before the engines that need them.
func (p *Plan) processes() (all []process) {
	for _, c := range p.Companions {
		all = append(all, where{}.companion(c, nil))
	}
	for i := range p.Engines {
		e := &p.Engines[i]
		for _, c := range e.Settings.Companions {
			all = append(all, where{}.companion(c, e))
		}
		all = append(all, p.process(e, where{}))
	}
	return all
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// shellQuote writes s as one word. Inside single quotes nothing has a meaning but the quote itself.
func shellQuote(s string) string {
	if plainWord.MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// delimiter returns a word that does not stand on a line of content alone.
func delimiter(content string) string {
	end := "END"
	for strings.Contains("\n"+content+"\n", "\n"+end+"\n") {
		end += "_"
	}
	return end
}

func writeComments(b *bytes.Buffer, indent string, lines []string) {
	for _, l := range lines {
		b.WriteString(indent + "# " + comment(l) + "\n")
	}
}

// comment keeps a text on its line: a line break would turn the rest of a comment into a command.
func comment(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0x85 || r == 0x2028 || r == 0x2029 {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
}
