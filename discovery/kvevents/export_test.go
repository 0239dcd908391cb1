// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Quicken shortens a subscriber's limits of time.
func Quicken(s *Subscriber) { s.t = quick }

// An engine that nobody has read holds much. Only single events have a bound.
func TestALongListIsReadWhole(t *testing.T) {
	const most = 2000
	n := 0
	read := func(list string) error {
		n = 0
		return readList(strings.NewReader(list), most, func([]byte) { n++ })
	}
	event := `{"x":"` + strings.Repeat("x", most/2) + `"}`
	require.NoError(t, read("["+strings.TrimSuffix(strings.Repeat(event+",", 100), ",")+"]"))
	assert.Equal(t, 100, n)
	require.ErrorIs(t, read("["+event+`,"`+strings.Repeat("x", 100_000)+`"]`), errTooMuch)
	assert.Equal(t, 1, n)
}
