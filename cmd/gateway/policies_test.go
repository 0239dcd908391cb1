// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestEachPolicyServes(t *testing.T) {
	p, d := startPair(t)
	for _, policy := range append(pick.Policies(), "session=X-User", "zone=a") {
		g := start(t, gatewayYAML("")+nixlYAML(p, d), "-pick", policy)
		status, _, body := do(t, http.MethodPost, g.client+"/v1/completions",
			`{"model":"tiny","prompt":"the secret prompt","max_tokens":4}`)
		require.Equal(t, http.StatusOK, status, "%s: %s", policy, body)
	}
}

func TestAPolicyThatIsNotThereIsRefused(t *testing.T) {
	var stderr strings.Builder
	_, err := parseFlags([]string{"-config", "x", "-pick", "fastest"}, &stderr)
	require.Error(t, err)
	require.Contains(t, stderr.String(), "want one of round-robin")
}
