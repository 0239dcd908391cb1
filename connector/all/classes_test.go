// SPDX-License-Identifier: Apache-2.0

package all_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/names"
)

// Every KV connector of vLLM, vllm-ascend and LMCache, as the wheels of a release name them, stands for a connector, or
// is refused with the reason. testdata/classes/classes.py makes the lists.
func TestEveryClassOfTheEnginesIsKnownOrRefused(t *testing.T) {
	files, err := filepath.Glob("testdata/classes/*.txt")
	require.NoError(t, err)
	require.Len(t, files, 3)
	for _, file := range files {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		list := strings.Fields(string(raw))
		require.NotEmpty(t, list, file)
		for _, class := range list {
			known, why := slices.Contains(names.Classes(), class), names.Refusal(class)
			assert.NotEqual(t, known, why != "", "%s: %s must be one of a connector's classes or refused", file, class)
			if known {
				assert.Contains(t, names.Connectors(), names.Resolve(class, nil), class)
				continue
			}
			_, err := connector.Open(config.Spec{Type: class})
			require.ErrorIs(t, err, names.ErrUnknown)
			assert.ErrorContains(t, err, "it "+why)
		}
	}
}
