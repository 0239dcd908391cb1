// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const mark = "<!-- The table is written by the tests: PDKIT_UPDATE=1 go test -run Page . -->\n"

// The README's table is made of the findings that the tests produce.
func TestThePageHasEveryFinding(t *testing.T) {
	var b strings.Builder
	b.WriteString("| code | | what is wrong | remedy |\n|---|---|---|---|\n")
	shown := map[string]bool{}
	for _, c := range table() {
		for _, f := range Check(deploy(t, c.wrong...), gateway(t, c.gateway)) {
			if f.Code != c.code || shown[f.Code] {
				continue
			}
			shown[f.Code] = true
			text := strings.ReplaceAll(strings.TrimPrefix(f.Text, "each "), "|", `\|`)
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.Code, f.Severity, text, f.Remedy)
		}
	}
	page, err := os.ReadFile("README.md")
	require.NoError(t, err)
	head, rest, found := strings.Cut(string(page), mark)
	require.True(t, found)
	_, tail, found := strings.Cut(rest, "\n\n")
	want := head + mark + b.String()
	if found {
		want += "\n" + tail
	}
	if os.Getenv("PDKIT_UPDATE") == "1" {
		require.NoError(t, os.WriteFile("README.md", []byte(want), 0o600))
	}
	assert.Equal(t, want, string(page))
}
