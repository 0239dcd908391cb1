// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestHowOftenAStreamIsRescued(t *testing.T) {
	for spec, want := range map[string]int{
		`{}`: 0, `{"rescue":{}}`: 0, `{"rescue":{"mode":"off","maxPerRequest":3}}`: 0, `{"rescue":{"mode":false}}`: 0,
		`{"rescue":{"mode":"on"}}`: 1, `{"rescue":{"mode":true}}`: 1, `{"rescue":{"mode":"on","maxPerRequest":3}}`: 3,
	} {
		var s Spec
		require.NoError(t, json.Unmarshal([]byte(spec), &s), spec)
		assert.Equal(t, want, s.Rescue.perRequest(), spec)
	}
}
