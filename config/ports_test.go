// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
)

func TestPortsAreNumbersAndRanges(t *testing.T) {
	for text, want := range map[string]string{
		`[8000]`: "8000", `[8000, 8001]`: "8000-8001", `["8000-8007"]`: "8000-8007",
		`["9000", "8000-8001"]`: "9000,8000-8001",
		`["8000, 8002"]`:        "8000,8002", `["65535-65535"]`: "65535", `null`: "",
	} {
		var got struct{ Ports config.Ports }
		require.NoError(t, config.Decode(json.RawMessage(`{"Ports":`+text+`}`), &got), text)
		assert.Equal(t, want, got.Ports.String(), text)
	}
	for _, text := range []string{`[]`, `8000`, `"8000-8007"`, `[0]`, `[65536]`, `[-1]`, `[8000.5]`, `[true]`, `[null]`,
		`[""]`, `["8000-"]`, `["8001-8000"]`, `["http"]`, `[8000, 8000]`, `["8000-8007", 8003]`, `["1-1025"]`,
		`["1-1024", 2000]`, `[[8000]]`, `{}`} {
		var got struct{ Ports config.Ports }
		faults := config.FieldErrors(config.Decode(json.RawMessage(`{"Ports":`+text+`}`), &got))
		if assert.Len(t, faults, 1, text) {
			assert.Equal(t, "Ports", faults[0].Path)
			assert.NotContains(t, faults[0].Problem, "80", "no value is repeated")
		}
	}
}
