// SPDX-License-Identifier: Apache-2.0

package file_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery/file"
)

// slowly writes a list in place, a line at a time. Each beginning of it is a list, too.
func slowly(t *testing.T, path string, names []string) {
	t.Helper()
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	for line := range strings.Lines(list(names...)) {
		_, err = f.WriteString(line)
		require.NoError(t, err)
		time.Sleep(10 * time.Millisecond)
	}
}

func many(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprint("e", i))
	}
	return names
}

// A file that is being written is read when it has stopped changing, even if events wake the reader earlier.
func TestAFileBeingWrittenIsNotRead(t *testing.T) {
	for name, began := range map[string]func(t *testing.T, path string, o *file.Options) *watched{
		"before the writing": func(t *testing.T, path string, o *file.Options) *watched {
			t.Helper()
			write(t, path, list("old"))
			w := watch(t, path, o)
			w.becomes("old")
			return w
		},
		"in the midst of it": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &file.Options{Poll: 20 * time.Millisecond, Quiet: 3 * time.Second}
			path := filepath.Join(t.TempDir(), "endpoints.yaml")
			var w *watched
			if began != nil {
				w = began(t, path, o)
			}
			written := make(chan struct{})
			go func() { defer close(written); slowly(t, path, many(30)) }()
			if w == nil {
				require.Eventually(t, func() bool { s, err := os.Stat(path); return err == nil && s.Size() > 100 },
					30*time.Second, time.Millisecond)
				w = watch(t, path, o)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
			defer cancel()
			for snap := range w.set.Changes(ctx) {
				if snap.Version > 0 && (len(snap.Endpoints) != 1 || snap.Endpoints[0].Host() != "old") {
					assert.Len(t, snap.Endpoints, 30, "half a list")
					break
				}
			}
			<-written
			w.becomes(many(30)...)
			assert.Empty(t, w.told())
		})
	}
}

// A file that is away for a moment, as some ways of writing have it, was never gone: a poll that falls into the moment
// says nothing.
func TestAMomentWithoutTheFileIsNoFault(t *testing.T) {
	t.Parallel()
	path, w := watchList(t, &file.Options{Poll: 800 * time.Millisecond, Quiet: 3 * time.Second}, "a")
	write(t, path, list("b"))
	w.becomes("b")
	require.NoError(t, os.Remove(path)) // the time to the next poll has just begun
	time.Sleep(1600 * time.Millisecond) // it ends within this
	write(t, path, list("c"))
	w.becomes("c")
	assert.Empty(t, w.told())
}

// A file that never stops changing is still read from time to time.
func TestAFileThatIsNeverStillIsRead(t *testing.T) {
	t.Parallel()
	path := newFile(t, "a")
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	require.NoError(t, err)
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		defer f.Close()
		for {
			select {
			case <-stop:
				return
			case <-time.After(2 * time.Millisecond):
				_, err := f.WriteString("# and on\n")
				assert.NoError(t, err)
			}
		}
	}()
	watch(t, path, &file.Options{Poll: time.Hour, Quiet: 50 * time.Millisecond}).becomes("a")
	close(stop)
	<-ended
}

// The beginning of a file that is too large may be a list, but is not the one that was written.
func TestTheBeginningOfAFileIsNotRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "endpoints.yaml")
	const limit = 8 << 20
	text := list("a") + "#"
	write(t, path, text+strings.Repeat("x", limit-1-len(text))+"\n  - {url: \"http://b:1\", role: both}\n")
	_, err := file.Load(path)
	assert.ErrorContains(t, err, "is too large")
	write(t, path, text+strings.Repeat("x", limit-1-len(text))+"\n")
	read, err := file.Load(path)
	require.NoError(t, err)
	assert.Len(t, read, 1)
}

// A folder that comes later is watched from then on.
func TestAFolderThatComesLaterIsWatched(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "later", "endpoints.yaml")
	w := watch(t, path, &file.Options{Poll: 4 * time.Second, Quiet: time.Millisecond})
	w.tells(1)
	require.NoError(t, os.Mkdir(filepath.Dir(path), 0o700))
	write(t, path, list("a"))
	w.becomes("a")
	began := time.Now()
	require.NoError(t, replace(path, list("b")))
	w.becomes("b")
	assert.Less(t, time.Since(began), 3*time.Second, "that was the next poll")
}
