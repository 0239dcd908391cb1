// SPDX-License-Identifier: Apache-2.0

package archtest

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

// Every document that a comment, a page or a golden file cites is in the repository.
func TestWhatIsCitedIsInTheRepository(t *testing.T) {
	all, err := texts(root)
	require.NoError(t, err)
	require.Greater(t, len(all), 300, "the walk must see the repository")
	for _, text := range all {
		if strings.HasPrefix(text.file, "internal/tools/archtest/") {
			continue // it has the names that nobody may cite
		}
		for _, fault := range checkCitations(root, text) {
			t.Error(fault)
		}
	}
}

func TestRelativeLinksResolve(t *testing.T) {
	all, err := texts(root)
	require.NoError(t, err)
	for _, text := range all {
		if filepath.Ext(text.file) != ".md" {
			continue
		}
		for _, fault := range checkLinks(root, text) {
			t.Error(fault)
		}
	}
}

func TestEveryRecordingIsOnItsPage(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, recordings, "*", "*.json"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		folder, name := filepath.Base(filepath.Dir(file)), filepath.Base(file)
		page, err := os.ReadFile(filepath.Join(root, protocols, folder+".md"))
		require.NoError(t, err)
		assert.Contains(t, string(page), "(recordings/"+folder+"/"+name+")",
			"a recording that nothing leads to only costs space")
	}
}

// Each row of the page on what only P knows names a test that is there.
func TestEachMemberOfThePromptHasATest(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, protocols, "prompt-members.md"))
	require.NoError(t, err)
	named := regexp.MustCompile("`(Test[A-Za-z]+)`")
	tests := map[string]bool{}
	require.NoError(t, filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		code, err := os.ReadFile(path)
		for _, m := range regexp.MustCompile(`(?m)^func (Test[A-Za-z]+)\(`).FindAllStringSubmatch(string(code), -1) {
			tests[m[1]] = true
		}
		return err
	}))
	rows := 0
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(line, "|")
		if len(cells) == 7 && !strings.Contains(line, "---") && cells[5] != " test " {
			rows++
			found := named.FindAllStringSubmatch(cells[5], -1)
			assert.NotEmpty(t, found, "no test: %s", line)
			for _, m := range found {
				assert.True(t, tests[m[1]], "%s is no test: %s", m[1], line)
			}
		}
	}
	assert.Greater(t, rows, 20)
}

func TestCitationsOfOtherPlacesAreFound(t *testing.T) {
	dir := t.TempDir()
	for name, body := range map[string]string{
		"docs/protocols/nixl.md":                      "# NIXL\n\n## 1. The legs\n",
		"docs/protocols/recordings/nixl/60-late.json": "{}",
		"docs/go-facts.md":                            "# Facts\n\n## 1. Bodies\n",
	} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(body), 0o600))
	}
	for _, good := range []string{
		"see docs/protocols/nixl.md §1, docs/protocols/nixl.md, recording 60",
		"docs/protocols/recordings/nixl/60-late.json",
		"vLLM's docs/features/x.md and LMCache's docs/source/y.rst", "a capture of 30 s", "testdata/captures/*.json",
		"docs/go-facts.md §1",
		"[protocols](protocols/nixl.md)",
		"[docs/protocols/nixl.md](../../docs/protocols/nixl.md), recording 60",
	} {
		assert.Empty(t, checkCitations(dir, text{"a.go", good}), good)
	}
	for _, bad := range []string{
		"(captures nixl/60)", "capture 39", "captures/README.md §2.1", "(protocols/vllm.md §1.2)",
		"see (protocols/vllm.md)", "go-notes.md §5", "GATEWAY.md: x",
		"../shared/captures", "what documents/3 names", "docs/protocols/none.md", "docs/none.md",
		"docs/protocols/nixl.md §9", "docs/go-facts.md §2",
		"docs/protocols/nixl.md, recordings 60 and 61", "docs/protocols/recordings/nixl/61-none.json",
	} {
		assert.Len(t, checkCitations(dir, text{"a.go", bad}), 1, bad)
	}
	assert.Empty(
		t, checkLinks(
			dir, text{"README.md", "[a](docs/protocols/nixl.md#1-the-legs) [b](https://x.example/y) [c](docs) " +
				"`code`\n\n    [d](none)\n"},
		),
	)
	assert.Len(t, checkLinks(dir, text{"README.md", "[a](docs/none.md) [b](docs/protocols/nixl.md#2-none)"}), 2)
	assert.Contains(t, comments([]byte("package a\n\n// One (captures\n// nixl/60).\nvar A int\n")),
		"(captures nixl/60)")
}
