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

func write(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		name = filepath.Join(dir, filepath.FromSlash(name))
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o750))
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	}
	return dir
}

func run(t *testing.T, roots ...string) string {
	t.Helper()
	var out strings.Builder
	require.NoError(t, report(&out, roots))
	return out.String()
}

const before = `package p

const (
	A = iota
	B
	c
)

var Err, other error

type Face interface {
	Do()
	hidden()
}

type hidden struct{}

func (hidden) Exported() {}

type List[T any] struct{ Field T }

func (l *List[T]) Len() int { return 0 }

func New() {}
`

func TestNamesAndMethodsAreCountedAsReadersSeeThem(t *testing.T) {
	dir := write(t, map[string]string{
		"p/p.go":          before,
		"p/p_test.go":     "package p\n\nfunc TestHelper() {}\n",
		"p/internal/i.go": "package internal\n\nfunc Internal() {}\n",
		"cmd/main.go":     "package main\n\nfunc Main() {}\n",
		"testdata/t.go":   "package testdata\n\nfunc Data() {}\n",
	})
	assert.Equal(t, `package                              names methods
p                                        6       2
all                                      6       2
`, run(t, dir), "A, B, Err, Face, List, New; Face.Do, List.Len")
}

func TestTwoTreesAreComparedByName(t *testing.T) {
	after := strings.NewReplacer("Len()", "Size()", "func New() {}", "").Replace(before)
	assert.Equal(t, `package                                     names        methods
p                                      6 ->     5     2 ->     2
q                                      0 ->     1     0 ->     0
all                                    6 ->     6     2 ->     2

p
- List.Len
+ List.Size
- New

q
+ V
`, run(t, write(t, map[string]string{"p/p.go": before}),
		write(t, map[string]string{"p/p.go": after, "q/q.go": "package q\n\nvar V int\n"})))
}

func TestFilesThatAreNoGoAreNamed(t *testing.T) {
	require.ErrorContains(t, report(os.Stderr, []string{write(t, map[string]string{"p.go": "packag"})}), "p.go:1")
	require.ErrorContains(t, report(os.Stderr, []string{"a", "b", "c"}), "3 folders")
}
