// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
)

func TestQuantity(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "8Gi": 8 << 30, "100M": 100e6, "1.5": 2, "2e3": 2000, "2E3": 2000, "1E": 1e18, "1k": 1000, "1Ki": 1024,
		"1.5Gi": 3 << 29,
		"100m":  1, "1n": 1, ".5": 1, "5.": 5, "+3": 3, "1e-3": 1, "9223372036854775807": math.MaxInt64,
	} {
		n, err := config.Quantity(text).Bytes()
		require.NoError(t, err, text)
		assert.Equal(t, want, n, text)
	}
	for _, text := range []string{"x", "8GB", "8 Gi", "1.2.3", ".", "-", "1e", "1e999999999", "0x10", "1_000", "1/2",
		"-1",
		"9223372036854775808", "8Ei", "--1", "1-1", strings.Repeat("9", 1000)} {
		_, err := config.Quantity(text).Bytes()
		assert.Error(t, err, text)
		raw, _ := json.Marshal(text)
		assert.Error(t, new(config.Quantity).UnmarshalJSON(raw), text)
	}
	var q config.Quantity
	require.NoError(t, q.UnmarshalJSON([]byte("8589934592")), "the Kubernetes API reads plain numbers too")
	assert.Equal(t, config.Quantity("8589934592"), q)
	require.Error(t, q.UnmarshalJSON([]byte("true")))
}
