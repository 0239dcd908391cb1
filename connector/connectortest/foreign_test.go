// SPDX-License-Identifier: Apache-2.0

package connectortest_test

import (
	"os"
	"os/exec"
	"testing"
)

// A third party's connector of 50 lines, in a module of its own, passes every rule.
func TestAForeignModulePassesEveryRule(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds a module")
	}
	run := exec.CommandContext(t.Context(), "go", "test", "./...")
	run.Dir = "testdata/ticket"
	run.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=readonly")
	if out, err := run.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
