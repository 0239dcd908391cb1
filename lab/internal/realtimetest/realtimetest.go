// SPDX-License-Identifier: Apache-2.0

// Package realtimetest is for tests of what takes real time. A machine that stands still for a moment is no fault.
package realtimetest

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
)

// tries is how often a check may fail before its test does.
const tries = 3

// Try runs a check until it holds. What a check finds wrong again and again is an error.
func Try(t *testing.T, check func(t assert.TestingT)) {
	t.Helper()
	for n := 1; ; n++ {
		var found complaints
		check(&found)
		switch {
		case len(found) == 0:
			return
		case n == tries:
			t.Error(found)
			return
		}
		t.Log("once more: ", found)
	}
}

type complaints []string

func (c *complaints) Errorf(format string, args ...any) {
	*c = append(*c, fmt.Sprintf(format, args...))
}
