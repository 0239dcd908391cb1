// SPDX-License-Identifier: Apache-2.0

package attest_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/attest"
)

func TestTry(t *testing.T) {
	for _, rate := range []float64{1, .3, .1, .03, .01} {
		for kind, draw := range kinds {
			var took []int
			bad := 0
			for seed := range uint64(20) {
				f := newFleet(seed, 8, 8, attest.EstimatorOptions{})
				s := draw(f)
				f.faults[s] = rate
				named := f.until(60000)
				took = append(took, f.probes)
				if len(named) != 1 || named[0].Suspect != s {
					bad++
				}
			}
			slices.Sort(took)
			t.Log(kind, rate, bad, took)
		}
	}
	require.True(t, true)
}
