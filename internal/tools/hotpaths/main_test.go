// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const printed = `goos: linux
pkg: example
BenchmarkA-2     	   20000	     200 ns/op	    1552 B/op	      19 allocs/op
BenchmarkB/x-2   	   20000	     50.5 ns/op	 12.00 MB/s	    0 B/op	       0 allocs/op
PASS`

func TestTheLinesOfBenchmarksAreRead(t *testing.T) {
	assert.Equal(t, map[string]result{"BenchmarkA-2": {200, 19}, "BenchmarkB/x-2": {50.5, 0}}, parse(printed))
	assert.Empty(t, parse("BenchmarkC-2 some words here\n--- FAIL: BenchmarkD\n"))
}

func TestTheLeastOfEachTreesRunsAreCompared(t *testing.T) {
	old := better(better(nil, map[string]result{"A": {100, 10}, "gone": {1, 1}}), map[string]result{"A": {400, 9}})
	now := better(better(nil, map[string]result{"A": {300, 9}, "new": {1, 1}}), map[string]result{"A": {120, 11}})
	assert.Equal(t, []row{{"pkg A", 1.2, 9, 9}}, judge("pkg", old, now))
}

func TestWhatIsBeyondItsBoundFails(t *testing.T) {
	for name, c := range map[string]struct {
		row  row
		why  string
		want string
	}{
		"as before":                     {row{"A", 1, 9, 9}, "", ""},
		"slower within the bound":       {row{"A", 1.5, 9, 8}, "", ""},
		"too slow":                      {row{"A", 1.51, 9, 9}, "", "A takes 1.51 times as long"},
		"an allocation more":            {row{"A", 1, 9, 10}, "", "A makes 10 allocations, 9 before"},
		"an allocation more, explained": {row{"A", 1, 9, 10}, "a header that engines need", ""},
		"too slow, explained":           {row{"A", 2, 9, 9}, "a header", "A takes 2.00 times as long"},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			err := report(&out, []row{c.row}, c.why)
			if c.want == "" {
				require.NoError(t, err)
			} else {
				require.EqualError(t, err, c.want)
			}
			assert.Contains(t, out.String(), "allocations 9 to")
		})
	}
	assert.Error(t, report(new(strings.Builder), nil, ""), "a comparison of nothing proves nothing")
}

func TestWithoutAnEarlierCommitThereIsNothingToCompare(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(t.Context(), &out, "no-such-commit"))
	assert.Contains(t, out.String(), "no commit no-such-commit")
}
