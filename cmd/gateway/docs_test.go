// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var yamlBlock = regexp.MustCompile("(?s)```yaml\n(.*?)```")

// Whole configurations in the project's pages are read without a fault. Fragments, which name no apiVersion, are not
// tried, nor is that of docs/configuration.md, which names files and has a test of its own.
func TestConfigurationsInTheDocsAreAccepted(t *testing.T) {
	pages := 0
	require.NoError(t, filepath.WalkDir("../..", func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != "..":
			return filepath.SkipDir
		case filepath.Ext(file) != ".md" || filepath.Base(file) == "configuration.md":
			return nil
		}
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		found := false
		for _, block := range yamlBlock.FindAllStringSubmatch(string(text), -1) {
			if !strings.HasPrefix(block[1], "apiVersion: networking.") &&
				!strings.HasPrefix(block[1], "apiVersion: pdkit.") {
				continue
			}
			found = true
			code, _, stderr := check(t, "-config", write(t, block[1]))
			assert.Equal(t, exitOK, code, "%s: %s\n%s", file, stderr, block[1])
		}
		if found {
			pages++
		}
		return nil
	}))
	assert.Greater(t, pages, 15, "pages with a configuration")
}

// The migration pages name each flag of the programs that they are for. The lists are from the programs' own --help.
func TestMigrationPagesNameEveryFlag(t *testing.T) {
	for _, program := range []string{"vllm-router", "smg"} {
		flags, err := os.ReadFile("testdata/flags/" + program + ".txt")
		require.NoError(t, err)
		page, err := os.ReadFile("../../docs/migration/" + program + ".md")
		require.NoError(t, err)
		named := map[string]bool{}
		for _, name := range regexp.MustCompile("`(--[a-z0-9-]+)[^`]*`").FindAllStringSubmatch(string(page), -1) {
			named[name[1]] = true
		}
		for line := range strings.Lines(string(flags)) {
			name := strings.TrimSpace(line)
			if name != "" && !strings.HasPrefix(name, "#") {
				assert.True(t, named[name], "docs/migration/%s.md says nothing of %s", program, name)
			}
		}
	}
}
