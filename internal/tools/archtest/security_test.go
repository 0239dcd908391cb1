// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	testNames = regexp.MustCompile("`((?:Test|Fuzz|Example)[A-Za-z0-9_]+)`")
	fileNames = regexp.MustCompile("`([a-z][A-Za-z0-9_./-]*\\.(?:go|sh|yml))`")
)

// Each test and each file that SECURITY.md and docs/reliability.md rest on is there, and each row of the threat model
// names a file and a test.
func TestSecurityAndReliabilityNameTestsAndFilesThatAreThere(t *testing.T) {
	declared := map[string]bool{}
	declaration := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Example)[A-Za-z0-9_]+)\(`)
	for _, name := range goFiles(t) {
		if !strings.HasSuffix(name, "_test.go") {
			continue
		}
		source, err := os.ReadFile(filepath.Join(root, name))
		require.NoError(t, err)
		for _, m := range declaration.FindAllSubmatch(source, -1) {
			declared[string(m[1])] = true
		}
	}
	for _, page := range []string{"SECURITY.md", "docs/reliability.md"} {
		text, err := os.ReadFile(filepath.Join(root, page))
		require.NoError(t, err)
		for _, m := range testNames.FindAllSubmatch(text, -1) {
			assert.True(t, declared[string(m[1])], "%s: no test is called %s", page, m[1])
		}
		for _, m := range fileNames.FindAllSubmatch(text, -1) {
			if name := string(m[1]); strings.Contains(name, "/") {
				assert.FileExists(t, filepath.Join(root, name), page)
			}
		}
	}
	rows := 0
	text, err := os.ReadFile(filepath.Join(root, "SECURITY.md"))
	require.NoError(t, err)
	_, model, found := strings.Cut(string(text), "| attack | defence | where | tested by |\n|---|---|---|---|\n")
	require.True(t, found)
	for line := range strings.Lines(model) {
		cells := strings.Split(strings.TrimSpace(line), " | ")
		if !strings.HasPrefix(line, "|") {
			break
		}
		rows++
		if assert.Len(t, cells, 4, line) {
			assert.Regexp(t, fileNames, cells[2], line)
			assert.Regexp(t, testNames, cells[3], line)
		}
	}
	assert.Greater(t, rows, 15)
}
