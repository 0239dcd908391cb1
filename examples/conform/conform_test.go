// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func failures(t *testing.T, g Gateway, patterns ...string) map[string]string {
	t.Helper()
	cases, err := Select(patterns)
	require.NoError(t, err)
	report, err := Run(t.Context(), g, cases, Options{Parallel: 12})
	require.NoError(t, err)
	found := map[string]string{}
	for _, r := range report.Results {
		if r.Verdict == Fail {
			found[r.ID] = "expected " + r.Want + "; saw " + r.Saw
		}
	}
	return found
}

func TestExplore(t *testing.T) {
	for id, text := range failures(t, gateway{os.Getenv("FAULT")}) {
		t.Log(id, text)
	}
}
