// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestBannedMembersAreFound(t *testing.T) {
	for name, c := range map[string]struct {
		file, source string
		says         string // empty: nothing is found
	}{
		"environment": {"pdflow/a.go", `package a; import "os"; var _ = os.Getenv("X")`, "pdflow/a.go:1: os.Getenv"},
		"looked up":   {"discovery/a.go", `package a; import "os"; func f() { os.LookupEnv("X") }`, "os.LookupEnv"},
		"under another name": {
			"transport/a.go", `package a; import sys "os"; var _ = sys.Environ()`, "os.Environ"},
		"given away, not called": {"pdflow/a.go", `package a; import "os"; var _ = os.Getenv`, "os.Getenv"},
		"dot import":             {"pdflow/a.go", `package a; import . "os"; var _ = Getenv("X")`, "dot import"},
		"the rest of os":         {"pdflow/a.go", `package a; import "os"; var _ = os.Args`, ""},
		"another os":             {"pdflow/a.go", `package a; import "example.org/os"; var _ = os.Getenv("X")`, ""},
		"client in a connector": {"connector/x/a.go", `package a; import "net/http"; var _ http.Client`,
			"net/http.Client"},
		"header in a connector": {"connector/x/a.go", `package a; import "net/http"; var _ http.Header`, ""},
		"client in the suite": {
			"connector/connectortest/a.go", `package a; import "net/http"; var _ http.Client`, ""},
		"client elsewhere": {"transport/a.go", `package a; import "net/http"; var _ http.Client`, ""},
		"the default one not": {"transport/a.go", `package a; import "net/http"; var _ = http.DefaultClient`,
			"net/http.DefaultClient"},
	} {
		t.Run(name, func(t *testing.T) {
			found, err := checkBans(root, c.file, c.source, bans)
			require.NoError(t, err)
			if c.says == "" {
				assert.Empty(t, found)
				return
			}
			require.Len(t, found, 1)
			assert.Contains(t, found[0], c.says)
		})
	}
}

func TestAnExampleWithAnInternalPackageIsFound(t *testing.T) {
	found, err := importsInternal(root, "examples/a/main.go", `package main; import "`+module+`/internal/jsonedit"`)
	require.NoError(t, err)
	require.Len(t, found, 1)
	assert.Contains(t, found[0], "internal/jsonedit")

	found, err = importsInternal(root, "examples/a/main.go", `package main; import "`+module+`/examples/a/internal/b"`)
	require.NoError(t, err)
	assert.Empty(t, found, "its own internal packages are its own")
}

func TestTheLicenceIsTheFirstLine(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		source string
		good   bool
	}{
		"first":   {licence + "\n\npackage a\n", true},
		"second":  {"\n" + licence + "\npackage a\n", false},
		"another": {"// SPDX-License-Identifier: MIT\npackage a\n", false},
		"none":    {"package a\n", false},
		"empty":   {"", false},
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name+".go"), []byte(c.source), 0o600))
		err := checkLicence(dir, name+".go")
		if c.good {
			assert.NoError(t, err, name)
		} else {
			assert.ErrorContains(t, err, name+".go:1", name)
		}
	}
}

func TestTheWalkSeesWhatTheCompilerSees(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a.go", "b/b.go", "b/testdata/no.go", ".tools/no.go", "_x/no.go", "vendor/no.go",
		"nested/c.go", "b/no.txt", "nested/go.mod", "go.mod"} {
		path := filepath.Join(dir, filepath.FromSlash(name))
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, nil, 0o600))
	}
	files, err := sourceFiles(dir)
	require.NoError(t, err)
	assert.ElementsMatch(t, []string{"a.go", "b/b.go", "nested/c.go"}, files)
	nested, err := nestedModules(dir)
	require.NoError(t, err)
	assert.Equal(t, []string{"nested/"}, nested)
}
