// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
)

func TestNumbersMayStandInQuotes(t *testing.T) {
	type settings struct {
		N config.Number `json:"n"`
	}
	for raw, want := range map[string]config.Number{
		`{"n":8e9}`: {Value: 8e9, Given: true}, `{"n":"8e9"}`: {Value: 8e9, Given: true},
		`{"n":" 21001 "}`: {Value: 21001, Given: true},
		`{"n":-1.5}`:      {Value: -1.5, Given: true}, `{"n":0}`: {Given: true}, `{"n":null}`: {}, `{}`: {},
	} {
		var s settings
		require.NoError(t, config.Decode(json.RawMessage(raw), &s), raw)
		assert.Equal(t, want, s.N, raw)
	}
	for _, raw := range []string{`{"n":"x"}`, `{"n":""}`, `{"n":true}`, `{"n":[1]}`, `{"n":"1e999"}`, `{"n":"NaN"}`,
		`{"n":"inf"}`} {
		var s settings
		err := config.Decode(json.RawMessage(raw), &s)
		require.Error(t, err, raw)
		assert.Equal(t, "n", config.FieldErrors(err)[0].Path)
	}
	assert.Equal(t, "8000000000", config.Number{Value: 8e9}.String())
}
