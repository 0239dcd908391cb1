// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
)

func TestClientsSeeTheirOwnID(t *testing.T) {
	fn := handoff.HideID(&connector.Session{RequestID: "r-1"}, "___prefill_addr_10.0.0.5:1_x")
	for data, want := range map[string]string{
		`{"id":"cmpl-___prefill_addr_10.0.0.5:1_x","choices":[]}`: `{"id":"cmpl-r-1","choices":[]}`,
		`{"id":"resp_1","choices":[{"text":"___prefill_addr_10.0.0.5:2_x"}]}`: `{"id":"resp_1",` +
			`"choices":[{"text":"___prefill_addr_10.0.0.5:2_x"}]}`,
		``: ``,
	} {
		got, err := fn([]byte(data))
		require.NoError(t, err)
		assert.Equal(t, want, string(got))
	}
}
