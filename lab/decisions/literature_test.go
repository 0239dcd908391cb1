// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// One trial of docs/literature.md is played again: it shows what its publication claims, and the page has its figures.
func TestTurn2AtDecodeIsPlayedAgain(t *testing.T) {
	for _, p := range papers() {
		if p.name != "Turn 2 at decode" {
			continue
		}
		all, err := p.gains.run(t.Context())
		require.NoError(t, err)
		assert.Less(t, p.gains.of.of(&all[1]), p.gains.of.of(&all[0]))
		if runtime.GOARCH != "amd64" {
			t.Skip("where products are added in one step, the last digits differ")
		}
		text, err := os.ReadFile("../../docs/literature.md")
		require.NoError(t, err)
		assert.Contains(t, string(text), tableOf(all))
		assert.Contains(t, string(text), p.gains.change(all))
		return
	}
	t.Fatal("there is no such trial")
}
