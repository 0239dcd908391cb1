// SPDX-License-Identifier: Apache-2.0

package cmdline

import (
	"flag"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestAnErrorIsOneLineWithTheNearestFlag(t *testing.T) {
	for args, want := range map[string]string{
		"-config x":     "",
		"--config x":    "",
		"-confg x":      "there is no flag -confg; did you mean -config?",
		"--Config=x":    "there is no flag -Config; did you mean -config?",
		"-zzz":          "there is no flag -zzz",
		"-n x":          `invalid value "x" for flag -n: parse error`,
		"-config":       "flag needs an argument: -config",
		"-=x":           "bad flag syntax: -=x",
		"-config x -nn": "there is no flag -nn; did you mean -n?",
	} {
		fs := flag.NewFlagSet("prog", flag.ContinueOnError)
		fs.String("config", "", "")
		fs.Int("n", 0, "")
		var stderr strings.Builder
		err := Parse(fs, strings.Fields(args), &stderr)
		if want == "" {
			assert.NoError(t, err)
			assert.Empty(t, stderr.String())
			continue
		}
		assert.ErrorIs(t, err, ErrWrong, args)
		assert.Equal(t, "prog: "+want+" (prog -help lists the flags)\n", stderr.String())
	}
}

func TestHelpIsTheUsage(t *testing.T) {
	fs := flag.NewFlagSet("prog", flag.ContinueOnError)
	fs.String("config", "", "the `FILE`")
	var stderr strings.Builder
	assert.ErrorIs(t, Parse(fs, []string{"-h"}, &stderr), flag.ErrHelp)
	assert.Contains(t, stderr.String(), "Usage of prog:\n  -config FILE")
}

func TestLineNamesProgramAndVersion(t *testing.T) {
	assert.Regexp(t, `^pdkit gateway \S+, go1\.\S+, \w+/\w+$`, Line("gateway"))
}
