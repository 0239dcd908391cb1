// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"strings"
)

type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

// completions are the scripts by which shells ask pdctl itself for the words that fit: they run it with the variable
// COMP_LINE, and kongplete answers from the same flags that kong reads. Where it knows no word, shells offer files.
var completions = map[string]string{
	"bash": `complete -o default -o bashdefault -C PDCTL pdctl
`,
	"zsh": `autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
complete -o default -o bashdefault -C PDCTL pdctl
`,
	//nolint:dupword // fish ends both blocks with the same word
	"fish": `function __complete_pdctl
    set -lx COMP_LINE (commandline -cp)
    test -z (commandline -ct); and set COMP_LINE "$COMP_LINE "
    set -l words (PDCTL)
    if test (count $words) -gt 0
        printf '%s\n' $words
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c pdctl -f -a "(__complete_pdctl)"
`,
}

// Run prints the script.
func (c *completionCmd) Run(s streams) error {
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("the path of this program is unknown: %w", err)
	}
	// bash reads the argument of -C as a command line once more, so that a path with spaces is quoted twice.
	quoted := quote(program)
	if c.Shell != "fish" {
		quoted = quote(quoted)
	}
	_, err = fmt.Fprint(s.out, strings.ReplaceAll(completions[c.Shell], "PDCTL", quoted))
	return err
}

// plainPath has the characters that no shell treats specially.
const plainPath = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+"

// quote writes a word as shells read it back.
func quote(word string) string {
	if strings.Trim(word, plainPath) == "" {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}
