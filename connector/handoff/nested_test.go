// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/connector/handoff"
)

// Engines read handoffs by recursion, so a deeply nested value must not reach decode under any key.
func TestNestedValues(t *testing.T) {
	deep := func(n int) string { return strings.Repeat(`{"a":[`, n) + strings.Repeat("]}", n) }
	for _, good := range []string{`{}`, `[[1,2],["]]]"]]`, `{"a":"\"[[{"}`, deep(32), `[` + strings.Repeat(`[],`, 500) +
		`[]]`} {
		assert.True(t, handoff.WellFormed([]byte(good)), "%.60s", good)
	}
	for _, bad := range []string{`[1,]`, `{"a":01}`, `[`, `["`, `["\`, deep(33), deep(4000), deep(20000)} {
		assert.False(t, handoff.WellFormed([]byte(bad)), "%.60s", bad)
	}
	assert.Error(t, check(`{"unknown":`+deep(100)+`}`, func(*handoff.Object) {}))
}
