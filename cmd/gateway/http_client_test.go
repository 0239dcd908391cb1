// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTheFlagHTTPClient(t *testing.T) {
	for client, netHTTP := range map[string]bool{"own": false, "nethttp": true} {
		f, err := parseFlags([]string{"-config", "x", "-http-client", client}, &strings.Builder{})
		require.NoError(t, err)
		cfg := configuration{gateway: gatewaySpec{Listen: "127.0.0.1:0"}}
		require.NoError(t, f.override(&cfg))
		assert.Equal(t, netHTTP, cfg.netHTTP)

		p, d := startPair(t)
		g := start(t, gatewayYAML("")+nixlYAML(p, d), "-http-client", client)
		status, header, body := do(t, http.MethodPost, g.client+"/v1/completions",
			`{"model":"tiny","prompt":"the secret prompt","max_tokens":4}`)
		require.Equal(t, http.StatusOK, status, body)
		assert.Equal(t, "disaggregated", header.Get("X-Pd-Mode"))
	}
	var stderr strings.Builder
	_, err := parseFlags([]string{"-config", "x", "-http-client", "curl"}, &stderr)
	require.Error(t, err)
	assert.Contains(t, stderr.String(), "must be own or nethttp")
}
