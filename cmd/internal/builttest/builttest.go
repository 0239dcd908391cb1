// SPDX-License-Identifier: Apache-2.0

// Package builttest gives tests the programs of this module as they are built.
package builttest

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
)

// Program returns a program of cmd, such as gateway, for a test of another package: a program's own tests start their
// test binary as the program. go run keeps what it has linked in the build cache, and so it is linked once for all
// tests that run it, here or by the commands of a page.
func Program(t testing.TB, name string) string {
	t.Helper()
	_, file, _, ok := runtime.Caller(0)
	if !ok {
		t.Fatal("the folder of the sources is not known")
	}
	program := filepath.Join(t.TempDir(), name)
	// In place of running it, sh copies it: a new one may lie in a folder that go run removes at its end.
	copied := fmt.Sprintf(`sh -c 'cp "$0" "%s"'`, program)
	cmd := exec.CommandContext(t.Context(), "go", "run", "-exec", copied, "./"+name) //nolint:gosec // a test's own name
	cmd.Dir = filepath.Join(filepath.Dir(file), "../..")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building %s: %v\n%s", name, err, out)
	}
	return program
}
