// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The page has what the code gives: some cells are played again. Where one differs, play all with
// go run ./lab/decisions -o docs.
func TestThePageHasWhatTheCodeGives(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("where products are added in one step, the last digits differ")
	}
	text, err := os.ReadFile("../../docs/decisions.md")
	require.NoError(t, err)
	all := cells()
	some := []*cell{all[0], all[50], all[100]}
	require.NoError(t, runAll(context.Background(), some, requestsUsual))
	for _, c := range some {
		assert.Contains(t, string(text), c.row())
	}
}

// The decider is at least as good as the best of the three where the link is fast and the engines suffice.
func TestTheDeciderIsAsGoodAsTheBest(t *testing.T) {
	c := &cell{w: &workloads[1], pd: [2]int{4, 4}, load: 1, link: links[1]}
	require.NoError(t, c.run(context.Background(), 500))
	assert.GreaterOrEqual(t, c.share(c.decider), near)
	assert.GreaterOrEqual(t, c.share(c.robust), robust)
	assert.Greater(t, c.always.good, c.never.good)
}
