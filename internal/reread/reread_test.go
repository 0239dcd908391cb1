// SPDX-License-Identifier: Apache-2.0

package reread_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/reread"
)

// Two files are read together: a new one beside an old one that it does not fit changes nothing yet.
func TestWhatFilesSayTogether(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	put := func(path, text string) { // as Kubernetes and careful programs do
		require.NoError(t, os.WriteFile(path+".new", []byte(text), 0o600))
		require.NoError(t, os.Rename(path+".new", path))
	}
	put(a, "1")
	put(b, "1")
	parsed := 0
	files, err := reread.Open(func(c [][]byte) (string, error) {
		parsed++
		if string(c[0]) != string(c[1]) {
			return "", errors.New("do not fit")
		}
		return string(c[0]), nil
	}, reread.File{What: "file", Path: a}, reread.File{What: "file", Path: b})
	require.NoError(t, err)
	assert.Equal(t, "1", files.Get())
	assert.Equal(t, 1, parsed, "unchanged files are not read again")
	put(a, "2")
	assert.Equal(t, "1", files.Get())
	put(b, "2")
	assert.Equal(t, "2", files.Get())
	require.NoError(t, os.Remove(a))
	assert.Equal(t, "2", files.Get())
	put(a, "3")
	put(b, "3")
	assert.Equal(t, "3", files.Get())
}

func TestFaultsNameTheFile(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	large := filepath.Join(dir, "large")
	require.NoError(t, os.WriteFile(large, make([]byte, 5<<20), 0o600))
	for path, why := range map[string]string{filepath.Join(dir, "none"): "no such file", pipe: "is not a file",
		large: "more than"} {
		_, err := reread.Open(func([][]byte) (int, error) { return 0, nil },
			reread.File{What: "token file", Path: path})
		require.ErrorContains(t, err, "token file "+path+": ")
		require.ErrorContains(t, err, why)
	}
}
