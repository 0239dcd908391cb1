// SPDX-License-Identifier: Apache-2.0

package modelserver_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

func TestAdaptersOfAModel(t *testing.T) {
	set := discovery.NewSet(nil)
	for given, c := range map[string]struct {
		want    modelserver.Adapters
		problem bool
	}{
		`"auto"`: {nil, false}, `null`: {nil, false}, `"off"`: {modelserver.Adapters{}, false},
		`false`: {modelserver.Adapters{}, false}, `["a","b"]`: {modelserver.Adapters{"a", "b"}, false},
		`"on"`: {nil, true}, `["a",""]`: {nil, true}, `7`: {nil, true}, `[7]`: {nil, true},
	} {
		m, err := modelserver.Read([]byte(`{"kind":"ModelServer","apiVersion":"networking.matrixinfer.ai/v1alpha1",` +
			`"spec":{"model":"m","adapters":` + given + `}}`))
		if c.problem {
			require.ErrorContains(t, err, "spec.adapters", given)
			require.ErrorContains(t, err, "write auto, off or", given)
			continue
		}
		require.NoError(t, err, given)
		assert.Equal(t, c.want, m.Spec.Adapters, given)
		serves := m.Spec.Adapters.Serves(set)
		assert.Equal(t, given == `"off"` || given == "false", serves == nil, given)
		if len(c.want) > 0 {
			assert.True(t, serves("b"))
			assert.False(t, serves("c"))
		}
	}
}
