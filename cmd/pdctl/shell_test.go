// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
)

func TestWordsAreThoseOfAShell(t *testing.T) {
	for text, want := range map[string][]string{
		`run a  b	c`:                            {"run", "a", "b", "c"},
		`run 'a b' "c d" e\ f ""`:               {"run", "a b", "c d", "e f", ""},
		`run 'it'\''s' "say \"hi\" \$x \n"`:     {"run", "it's", `say "hi" $x \n`},
		"run a \\\n  b # comment\n":             {"run", "a", "b"},
		"X='a b'; run $X \"$X\" '$X' ${X}c":     {"run", "a", "b", "a b", "$X", "a", "bc"},
		`run ${Y:-1} ${Y-'2'} "${Y}" $Y end`:    {"run", "1", "2", "", "end"},
		`X=1 Y=2; run`:                          {"run"},
		`run "$@" $@ a$(date)b $1`:              {"run", "ab"},
		`run >out 2>&1 <in a`:                   {"run", "a"},
		`exec nohup run a &`:                    {"run", "a"},
		`if ! run a; then :; fi`:                {"run", "a"},
		`case $x in a) run a ;; esac`:           {"run", "a"},
		"case $x in\nb|c)\n run a\n;;\nesac\n":  {"run", "a"},
		`bash -c 'X=3; run $X'`:                 {"run", "3"},
		`timeout 10 bash -euc "run \$HOME_DIR"`: {"run"},
		`run a#b '#c'`:                          {"run", "a#b", "#c"},
		`run {"a":1,"b":"x y"}`:                 {"run", `{a:1,b:x y}`},
		`run $ "$" a$`:                          {"run", "$", "$", "a$"},
		"run `date` a":                          {"run", "a"},
	} {
		var got []string
		for _, c := range readScript(text).commands {
			if c.argv[0] == "run" {
				got = c.argv
			}
		}
		assert.Equal(t, want, got, text)
	}
}

// A shell runs the same scripts, and does what pdctl reads.
func TestAShellAgrees(t *testing.T) {
	sh, err := exec.LookPath("sh")
	if err != nil {
		require.Empty(t, os.Getenv("CI"), "CI must have sh")
		t.Skip("needs sh, which this machine does not have")
	}
	for _, text := range []string{
		`X='a b'; run $X "$X" '$X' ${X}c "${X}"`, `run 'it'\''s' "say \"hi\" \$x \n \\ \a"`, `run a\ b \$x \"q\" ''`,
		"run a \\\n b", `Y=; run ${Y:-d} ${Y-e} ${Z-f} "${Z:-g h}" end`,
		`run a; X=2 run b; run "$X"`, `A='x"y'; run "$A" '"'`, `run "$@" end`, `run a=b "c=d" --e='f g'`,
		"run 'a\nb' \"c\nd\"",
		"case ${X:-q} in\nq) run q ;;\nesac", "run <<E\nbody\nE\nrun after", `run $ a$ "$" 1$`,
	} {
		out, err := exec.CommandContext(t.Context(), sh, "-c", "run() { printf '<%s>' \"$@\"; echo; }\n"+text+
			"\n").Output()
		require.NoError(t, err, text)
		var got strings.Builder
		for _, c := range readScript(text).commands {
			got.WriteString("<" + strings.Join(c.argv[1:], "><") + ">\n")
		}
		assert.Equal(t, string(out), got.String(), text)
	}
}

func TestEnvironmentsAreThoseOfEachCommand(t *testing.T) {
	s := readScript(`
A=1            # not exported
export B=2 C
D=4 run one
env -i E="5 6" F= run two
export G=7; run three
case $x in
p) export H=8; run four ;;
q) run five ;;
esac
B=9
run six
`)
	env := map[string]map[string]string{}
	for _, c := range s.commands {
		env[c.argv[1]] = c.env
	}
	assert.Equal(t, map[string]string{"B": "2", "C": "", "D": "4"}, env["one"])
	assert.Equal(t, map[string]string{"E": "5 6", "F": ""}, env["two"])
	assert.Equal(t, "7", env["three"]["G"])
	assert.Equal(t, "8", env["four"]["H"])
	assert.NotContains(t, env["five"], "H", "another branch's")
	assert.Equal(t, "9", env["six"]["B"])
	assert.Equal(t, "q", s.commands[4].label)
	assert.Equal(t, 9, s.commands[4].line)
}

func TestHereDocumentsAreFiles(t *testing.T) {
	s := readScript("X=1\ncat > a.yaml <<'END'\nk: $X\n'\nEND\ncat <<-E >b.yaml\n\tk: $X\n\tE\ntee c.yaml <<\"Q\" " +
		">/dev/null\nc\nQ\nrun\n")
	assert.Equal(t, "k: $X\n'\n", string(s.files["a.yaml"]))
	assert.Equal(t, "\tk: 1\n", string(s.files["b.yaml"]))
	assert.Equal(t, "c\n", string(s.files["c.yaml"]))
	require.NotEmpty(t, s.commands)
	assert.Equal(t, []string{"run"}, s.commands[len(s.commands)-1].argv)
}

// For any file, reading it ends.
func FuzzReadInput(f *testing.F) {
	f.Add("services:\n  a: {command: vllm serve m, configs: [b]}\n")
	f.Add("kind: Pod\nspec: {containers: [{args: [$(X], env: [{name: X}]}]}\n")
	f.Add("case $x in a) vllm serve 'm' <<E\nE\n;; esac `\"${x:-")
	f.Add("kind: ModelBooster\nspec: {workers: [{config: {a: [1]}}]}")
	f.Fuzz(func(t *testing.T, text string) {
		list, err := readInput("input", []byte(text))
		if err != nil {
			return
		}
		for _, l := range list {
			l.read = nil
			_, _, _ = l.parse(launch.Version{})
		}
	})
}
