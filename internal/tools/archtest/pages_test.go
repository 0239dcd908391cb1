// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// docs/choosing.md lists each connector of docs/connectors.md, with the same versions.
func TestChoosingKnowsEachConnectorAndItsVersions(t *testing.T) {
	connectors, err := os.ReadFile(filepath.Join(root, "docs", "connectors.md"))
	require.NoError(t, err)
	_, table, found := strings.Cut(string(connectors), "<!-- connectors -->")
	require.True(t, found)
	table, _, _ = strings.Cut(table, "<!-- /connectors -->")
	choosing, err := os.ReadFile(filepath.Join(root, "docs", "choosing.md"))
	require.NoError(t, err)
	rows := map[string]string{}
	for line := range strings.Lines(string(choosing)) {
		if cells := strings.Split(line, " | "); strings.HasPrefix(line, "| `") {
			rows[strings.TrimPrefix(cells[0], "| ")] = strings.TrimSuffix(strings.TrimSpace(cells[len(cells)-1]), " |")
		}
	}
	known := 0
	for line := range strings.Lines(table) {
		if cells := strings.Split(line, " | "); strings.HasPrefix(line, "| `") {
			known++
			name := strings.TrimPrefix(cells[0], "| ")
			assert.Equal(t, cells[3], rows[name], "%s in docs/choosing.md: engine versions", name)
		}
	}
	assert.Len(t, rows, known, "docs/choosing.md and docs/connectors.md list the same connectors")
	require.Greater(t, known, 10)
}

// docs/troubleshooting.md has a row for each code of an error.
func TestTroubleshootingKnowsEachErrorCode(t *testing.T) {
	source, err := os.ReadFile(filepath.Join(root, "pdflow", "errors.go"))
	require.NoError(t, err)
	page, err := os.ReadFile(filepath.Join(root, "docs", "troubleshooting.md"))
	require.NoError(t, err)
	_, table, found := strings.Cut(string(page), "| code | status |")
	require.True(t, found)
	var codes, rows []string
	for _, m := range regexp.MustCompile(`Code = "(\w+)"`).FindAllStringSubmatch(string(source), -1) {
		codes = append(codes, m[1])
	}
	for line := range strings.Lines(table) {
		if cell, _, row := strings.Cut(strings.TrimPrefix(line, "| "), " | "); row && strings.HasPrefix(cell, "`") {
			rows = append(rows, strings.Split(strings.ReplaceAll(cell, "`", ""), ", ")...)
		}
	}
	require.Greater(t, len(codes), 20)
	assert.ElementsMatch(t, codes, rows)
}

// Every public package of the root module has an Example that runs.
func TestEveryPublicPackageHasAnExample(t *testing.T) {
	nested, err := nestedModules(root)
	require.NoError(t, err)
	packages := map[string]bool{} // folder → has an example
	for _, name := range goFiles(t) {
		dir := filepath.Dir(name)
		if strings.Contains(name, "internal/") ||
			slices.ContainsFunc(nested, func(m string) bool { return strings.HasPrefix(name, m) }) {
			continue
		}
		body, err := os.ReadFile(filepath.Join(root, name))
		require.NoError(t, err)
		isTest := strings.HasSuffix(name, "_test.go")
		if !isTest && strings.Contains(string(body), "\npackage main\n") {
			continue
		}
		packages[dir] = packages[dir] || isTest && strings.Contains(string(body), "\nfunc Example")
	}
	require.Contains(t, packages, "connector")
	for dir, has := range packages {
		assert.True(t, has, "%s has no Example", dir)
	}
}
