// SPDX-License-Identifier: Apache-2.0

// Package sharedtest has what tests of several packages need.
package sharedtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// Log collects what many goroutines write: a request may log after its client has the response.
type Log struct {
	mu sync.Mutex
	b  strings.Builder
}

// Write appends to the log.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// String returns what was written.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Take returns what was written, and forgets it.
func (l *Log) Take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.b.Reset()
	return l.b.String()
}

// WaitFor waits until the log has a text.
func (l *Log) WaitFor(t testing.TB, text string) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !strings.Contains(l.String(), text); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the log has no %q:\n%s", text, l)
		}
	}
}

// Python returns a Python with pyzmq and msgspec, or skips the test. With CI=true it must be there:
// connector/lmcachepd/testdata/install.sh installs it. The package of the test is two folders below the root.
func Python(t testing.TB) string {
	t.Helper()
	own, err := filepath.Abs("../../.tools/pyzmq/bin/python")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{own, "python3"} {
		if exec.CommandContext(t.Context(), p, "-c", "import zmq, msgspec").Run() == nil { //nolint:gosec // of a test
			return p
		}
	}
	const missing = "no Python with pyzmq and msgspec: run connector/lmcachepd/testdata/install.sh"
	if os.Getenv("CI") == "true" {
		t.Fatal(missing)
	}
	t.Skip(missing)
	return ""
}
