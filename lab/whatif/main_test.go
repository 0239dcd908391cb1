// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/lab/internal/realtimetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// One prefill engine in place of two cannot keep up with the requests: an effect that no noise hides.
// docs/what-if.md has the others.
func TestWhatIsPredictedOfAChangeIsWhatItDoes(t *testing.T) {
	if testing.Short() {
		t.Skip("half a minute of real time")
	}
	c := changes[1]
	require.Equal(t, "ratio", c.name)
	realtimetest.Try(t, func(check assert.TestingT) {
		p, err := try(t.Context(), newLoad(1, 70, 7), []change{c})
		require.NoError(t, err)
		t.Log(p.rows(1))
		ttft, goodput := p.alike(0)
		assert.True(check, ttft, "the sign of the change of TTFT p99")
		assert.True(check, goodput, "the sign of the change of goodput")
		assert.Greater(check, p.predicted[0].TTFTP99, 2*p.replayed.TTFTP99)
	})
}

func TestWrongFlagsAreRefused(t *testing.T) {
	for _, args := range [][]string{{"-requests", "0"}, {"-rounds", "0"}, {"-rate", "0"}, {"-only", "x"}, {"more"}} {
		require.Error(t, command(t.Context(), args, &bytes.Buffer{}), args)
	}
}
