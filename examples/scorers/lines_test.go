// SPDX-License-Identifier: Apache-2.0

package scorers_test

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What another scheduler's plugin needs of pdkit stays small: lines after the imports that are neither empty nor a
// comment.
func TestAPluginHasAtMostSixtyLines(t *testing.T) {
	for _, file := range []string{"llmd/plugin.go", "kthena/plugin.go", "aibrix/policy.go"} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		_, code, found := strings.Cut(string(text), "pdflow/decide\"\n")
		require.True(t, found)
		n := 0
		for line := range strings.Lines(strings.TrimPrefix(code, ")\n")) {
			if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "//") {
				n++
			}
		}
		assert.LessOrEqual(t, n, 60, file)
	}
}
