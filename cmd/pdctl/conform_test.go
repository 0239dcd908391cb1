// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestConformRefusesWhatItCannotRun(t *testing.T) {
	for want, args := range map[string][]string{
		"--cmd starts it for each case": nil,
		"--only: no case matches":       {"--only", "nothing", "--url", "http://127.0.0.1:1"},
		"--config and --setup go with":  {"--url", "http://127.0.0.1:1", "--setup", "true"},
		"--cmd: a quote is not closed":  {"--cmd", "sh 'x"},
		"no such flag":                  {"--cmd", "sh -c 'echo no such flag'", "--only", "wire/chat"},
	} {
		code, _, errs := pdctl(t, "", append([]string{"conform"}, args...)...)
		assert.Equal(t, exitUsage, code, args)
		assert.Contains(t, errs, want)
	}
}

func TestConformJoinsReports(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a.json")
	require.NoError(t, os.WriteFile(file, []byte(`{"gateway":"g","results":[{"id":"wire/chat","severity":"must",`+
		`"verdict":"fail","expected":"a","saw":"b"}]}`), 0o600))
	code, out, errs := pdctl(t, "", "conform", "--table", file)
	assert.Equal(t, exitOK, code, errs)
	assert.Contains(t, out, "| `wire/chat` | must | **fail** |")
	assert.Contains(t, out, "- `wire/chat` (must): expected a; saw b")
}

func TestWordsAreSplitAsByAShell(t *testing.T) {
	all, err := words(`a  "b c" 'd "e"' --x='' f`)
	require.NoError(t, err)
	assert.Equal(t, "a|b c|d \"e\"|--x=|f", strings.Join(all, "|"))
}
