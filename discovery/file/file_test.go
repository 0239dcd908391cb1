// SPDX-License-Identifier: Apache-2.0

package file_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/discovery/file"
)

// Notifications alone must do, where a test does not say otherwise.
var unpolled = &file.Options{Poll: time.Hour, Quiet: 5 * time.Millisecond}

func list(names ...string) string {
	var b strings.Builder
	b.WriteString("endpoints:\n")
	for _, n := range names {
		fmt.Fprintf(&b, "  - {url: \"http://%s:8000\", role: both}\n", n)
	}
	if len(names) == 0 {
		return "endpoints: []\n"
	}
	return b.String()
}

func write(t testing.TB, path, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

// replace changes a file as the documentation recommends.
func replace(path, text string) error {
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// watched is a set over one file.
type watched struct {
	t    *testing.T
	set  *discovery.Set
	mu   sync.Mutex
	errs []string
}

func watch(t *testing.T, path string, o *file.Options) *watched {
	t.Helper()
	s, err := file.New(path, o)
	require.NoError(t, err)
	w := &watched{t: t, set: discovery.NewSet(s)}
	w.set.OnError(func(err error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.errs = append(w.errs, err.Error())
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- w.set.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return w
}

// watchList writes a list of engines, and watches it until the set has them.
func watchList(t *testing.T, o *file.Options, names ...string) (path string, w *watched) {
	t.Helper()
	path = newFile(t, names...)
	w = watch(t, path, o)
	w.becomes(names...)
	return path, w
}

// newFile writes a list of engines.
func newFile(t *testing.T, names ...string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "endpoints.yaml")
	write(t, path, list(names...))
	return path
}

func (w *watched) told() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.errs...)
}

// becomes waits until the set lists exactly the named engines.
func (w *watched) becomes(names ...string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 30*time.Second)
	defer cancel()
	err := w.set.WaitReady(ctx, func(s *discovery.Snapshot) bool {
		if s.Version == 0 || len(s.Endpoints) != len(names) {
			return false
		}
		for i, e := range s.Endpoints {
			if e.ID != names[i]+":8000" {
				return false
			}
		}
		return true
	})
	require.NoError(w.t, err, "want %v, have %v; told %v", names, w.set.Load().Endpoints, w.told())
}

// tells waits for the n-th error and returns it.
func (w *watched) tells(n int) string {
	w.t.Helper()
	require.Eventually(w.t, func() bool { return len(w.told()) >= n }, 30*time.Second, time.Millisecond,
		"want %d errors", n)
	return w.told()[n-1]
}

func TestRulesOfSources(t *testing.T) {
	var path string
	var n atomic.Int32
	next := func() string {
		i := n.Add(1)
		return list(fmt.Sprint("p", i), fmt.Sprint("d", i))
	}
	now := ""
	discoverytest.Run(t, discoverytest.Harness{
		New: func() discovery.Source {
			path = filepath.Join(t.TempDir(), "endpoints.yaml")
			now = next()
			write(t, path, now)
			s, err := file.New(path, unpolled)
			require.NoError(t, err)
			return s
		},
		Change: func() error { now = next(); return replace(path, now) },
		Break:  func() error { return os.WriteFile(path, []byte("endpoints: [{"), 0o600) },
		Repair: func() error { return replace(path, now) },

		Timeout: 30 * time.Second,
	})
}

func TestNewRefusesNoPath(t *testing.T) {
	_, err := file.New("", nil)
	require.EqualError(t, err, "file: the path is empty")
}

// Each way in which files are changed is noticed by notification alone.
func TestChangesAreNoticed(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, path, text string){
		"written in place": func(t *testing.T, path, text string) { write(t, path, text) },
		"written in pieces": func(t *testing.T, path, text string) {
			f, err := os.Create(path)
			require.NoError(t, err)
			defer f.Close()
			for i := range len(text) {
				_, err = f.WriteString(text[i : i+1])
				require.NoError(t, err)
			}
		},
		"replaced": func(t *testing.T, path, text string) { require.NoError(t, replace(path, text)) },
		"moved away and written anew": func(t *testing.T, path, text string) {
			require.NoError(t, os.Rename(path, path+"~"))
			write(t, path, text)
		},
		"removed and written anew": func(t *testing.T, path, text string) {
			require.NoError(t, os.Remove(path))
			write(t, path, text)
		},
	} {
		t.Run(name, func(t *testing.T) {
			path, w := watchList(t, unpolled, "a")
			change(t, path, list("b", "c"))
			w.becomes("b", "c")
			change(t, path, list())
			w.becomes()
			change(t, path, list("d")) // a watch of the file itself would have ended by now
			w.becomes("d")
		})
	}
}

func TestAConfigMapsSwapIsNoticed(t *testing.T) {
	c := newConfigMap(t, list("a"))
	w := watch(t, c.file(), unpolled)
	w.becomes("a")
	c.set(list("b"))
	w.becomes("b")
	c.set(list("c"))
	w.becomes("c")
	assert.Empty(t, w.told())
}

func TestABadFileKeepsTheLastGoodListAndSaysWhy(t *testing.T) {
	for name, c := range map[string]struct {
		bad  func(t *testing.T, path string)
		want string
	}{
		"syntax": {func(t *testing.T, path string) { require.NoError(t, replace(path, "endpoints: [{url: hunter2")) },
			"line 2: yaml: did not find expected ',' or '}'; correct the syntax at or just before this line"},
		"field": {
			func(t *testing.T, path string) {
				require.NoError(t, replace(path, "endpoints:\n- {url: http://a:1, rol: hunter2}"))
			},
			"line 2: endpoints[0].rol: unknown field; did you mean role?",
		},
		"twice": {func(t *testing.T, path string) { require.NoError(t, replace(path, list("a", "a"))) },
			"line 3: endpoints[1].url: is listed twice, first as [0]"},
		"gone": {func(t *testing.T, path string) { require.NoError(t, os.Remove(path)) },
			"cannot be read: no such file or directory"},
		"folder gone": {func(t *testing.T, path string) { require.NoError(t, os.RemoveAll(filepath.Dir(path))) },
			"cannot be read: no such file or directory"},
		"folder": {
			func(t *testing.T, path string) {
				require.NoError(t, os.Mkdir(path+".new", 0o700))
				require.NoError(t, os.Remove(path))
				require.NoError(t, os.Rename(path+".new", path))
			},
			"is not a file",
		},
		"pipe": {
			func(t *testing.T, path string) {
				require.NoError(t, syscall.Mkfifo(path+".new", 0o600))
				require.NoError(t, os.Rename(path+".new", path))
			},
			"is not a file",
		},
		"empty": {func(t *testing.T, path string) { require.NoError(t, replace(path, "")) },
			"line 1: file: is empty; write endpoints: [] for none"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "folder")
			require.NoError(t, os.Mkdir(dir, 0o700))
			path := filepath.Join(dir, "endpoints.yaml")
			write(t, path, list("a", "b"))
			w := watch(t, path, &file.Options{Poll: 500 * time.Millisecond, Quiet: 20 * time.Millisecond})
			w.becomes("a", "b")
			version := w.set.Load().Version
			c.bad(t, path)
			told := w.tells(1)
			if name == "folder" && strings.Contains(told, "no such file") {
				told = w.tells(2) // the moment between the two was read, too
			}
			assert.Contains(t, told, `discovery source 0: file "endpoints.yaml": `+c.want)
			assert.Contains(t, told, "(the last good list stays)")
			assert.NotContains(t, told, "hunter2")
			assert.NotContains(t, told, dir)
			assert.Len(t, w.set.Load().Endpoints, 2)
			assert.Equal(t, version, w.set.Load().Version, "nobody's cache is thrown away for a bad file")

			require.NoError(t, os.MkdirAll(dir, 0o700))
			require.NoError(t, os.RemoveAll(path)) // what is not a file cannot be replaced by one
			require.NoError(t, replace(path, list("c")))
			w.becomes("c")
		})
	}
}

func TestAFaultIsToldOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "endpoints.yaml")
	w := watch(t, path, &file.Options{Poll: 2 * time.Millisecond, Quiet: time.Millisecond})
	assert.Contains(t, w.tells(1), "cannot be read: no such file or directory (there is no list yet)")
	time.Sleep(300 * time.Millisecond) // the set watches again after 100 ms at most
	assert.Len(t, w.told(), 1)
	assert.Zero(t, w.set.Load().Version, "without any list nothing is published")

	// a file that is written in place is empty for a moment, which is a fault too
	require.NoError(t, replace(path, list("a")))
	w.becomes("a")
	require.NoError(t, os.Remove(path))
	assert.Contains(t, w.tells(2), "(the last good list stays)", "after a good file it is news again")
}

// Where no notification comes, the polling finds the change: a folder that is replaced, one that comes later.
func TestPollingFindsWhatIsNotNotified(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "current", "endpoints.yaml")
	w := watch(t, path, &file.Options{Poll: 20 * time.Millisecond, Quiet: time.Millisecond})
	w.tells(1)
	for _, name := range []string{"a", "b"} {
		release := filepath.Join(root, name)
		require.NoError(t, os.Mkdir(release, 0o700))
		write(t, filepath.Join(release, "endpoints.yaml"), list(name))
		require.NoError(t, os.Symlink(name, filepath.Join(root, "next")))
		require.NoError(t, os.Rename(filepath.Join(root, "next"), filepath.Join(root, "current")))
		w.becomes(name)
	}
}

func TestASourceIsWatchedOnceAtATime(t *testing.T) {
	path := newFile(t, "a")
	s, err := file.New(path, nil)
	require.NoError(t, err)
	set := discovery.NewSet(s)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- set.Run(ctx) }()
	require.NoError(t, set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return s.Version > 0 }))
	require.EqualError(t, s.Watch(t.Context(), func(discovery.Snapshot) { assert.Fail(t, "published") }),
		"file: the source is being watched already")
	cancel()
	require.NoError(t, <-done)
}

// The source never publishes a mixture of two versions of the file, even if the file changes very often.
func TestNoListIsEverHalf(t *testing.T) {
	path, w := watchList(t, &file.Options{Poll: time.Millisecond, Quiet: time.Millisecond}, "a", "a2")
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 300 {
			n := string(rune('a' + i%26))
			assert.NoError(t, replace(path, list(n, n+"2")))
			time.Sleep(time.Millisecond)
		}
	}()
	for ended := false; !ended; {
		select {
		case <-done:
			ended = true
		case <-w.set.Changed():
		}
		s := w.set.Load().Endpoints
		require.Len(t, s, 2)
		assert.Equal(t, s[0].Host()+"2", s[1].Host())
	}
	w.becomes("n", "n2")
	assert.Empty(t, w.told())
}

func TestAFileThatIsAsItWasIsNotPublishedAgain(t *testing.T) {
	path := newFile(t, "a")
	s, err := file.New(path, &file.Options{Poll: 2 * time.Millisecond, Quiet: time.Millisecond})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	published := 0
	require.NoError(t, s.Watch(ctx, func(discovery.Snapshot) {
		published++
		time.AfterFunc(200*time.Millisecond, cancel)
	}))
	assert.Equal(t, 1, published)
}

func TestAFileThatGoesAgainIsToldAgain(t *testing.T) {
	path, w := watchList(t, &file.Options{Poll: 2 * time.Millisecond, Quiet: time.Millisecond}, "a")
	require.Eventually(t, func() bool { // as often as it takes for both states to be read
		require.NoError(t, os.Remove(path))
		assert.Contains(t, w.tells(1), "no such file")
		time.Sleep(20 * time.Millisecond)
		require.NoError(t, replace(path, list("a"))) // as it was
		time.Sleep(20 * time.Millisecond)
		return len(w.told()) >= 2
	}, 20*time.Second, 150*time.Millisecond)
	w.becomes("a")
}
