// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/config"
)

func TestEngineVersions(t *testing.T) {
	for text, want := range map[string]config.EngineVersion{
		"": {}, "0.32.0": {Minor: 32}, "v0.32": {Minor: 32}, "0.32.1+cpu": {Minor: 32, Patch: 1},
		"0.26.0rc1": {Minor: 26}, "1.2.3.post1": {Major: 1, Minor: 2, Patch: 3},
	} {
		v, err := config.ParseEngineVersion(text)
		assert.NoError(t, err, text)
		assert.Equal(t, want, v, text)
	}
	for _, text := range []string{"1", "latest", "0.x", "-1.2", "1.2.x"} {
		_, err := config.ParseEngineVersion(text)
		assert.ErrorContains(t, err, "not a version", text)
	}
	assert.False(t, config.EngineVersion{}.Before(9, 9), "an unknown one counts as the newest")
	assert.True(t, config.EngineVersion{Minor: 31, Patch: 9}.Before(0, 32))
	assert.False(t, config.EngineVersion{Major: 1}.Before(0, 32))
	assert.Equal(t, "0.32.1", config.EngineVersion{Minor: 32, Patch: 1}.String())
	assert.Empty(t, config.EngineVersion{}.String())
}
