// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Two models with the same connector are two series. One model has its name too, since a reload may add another.
func TestMetricsTellModelsApart(t *testing.T) {
	p, d := startPair(t)
	for models := 1; models <= 2; models++ {
		yaml := gatewayYAML("") + nixlYAML(p, d)
		if models == 2 {
			yaml += strings.ReplaceAll(nixlYAML(p, d), "tiny", "small")
		}
		g := start(t, yaml)
		status, _, body := do(t, http.MethodPost, g.client+"/v1/completions",
			`{"model":"tiny","prompt":"hi","max_tokens":2}`)
		require.Equal(t, http.StatusOK, status, body)
		var series []string
		_, _, metrics := do(t, http.MethodGet, g.admin+"/metrics", "")
		for line := range strings.Lines(metrics) {
			if strings.HasPrefix(line, "pd_request_duration_seconds_count{") {
				series = append(series, line)
			}
		}
		require.Len(t, series, 1)
		assert.Contains(t, series[0], `gen_ai_request_model="tiny"`)
	}
}
