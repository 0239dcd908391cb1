// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// Others send requests to the engines, too: another gateway, or a program that asks an engine itself. With -inspect the
// engine tells of them, and the policy goes by it.
func TestRequestsThatOthersHaveSentCount(t *testing.T) {
	p, busy := simPair(t, enginesim.Config{}, enginesim.Config{ITL: 100 * time.Millisecond})
	_, idle := simPair(t, enginesim.Config{}, enginesim.Config{})
	g := start(t, gatewayYAML("")+simYAML("", p, busy, nil, idle), "-pick", "least-load", "-inspect", "50ms")
	const body = `{"model":"tiny","prompt":"hi","max_tokens":%n,"stream":true}`
	ask := func(url, tokens string) {
		resp, err := http.Post(url+"/v1/completions", "application/json",
			strings.NewReader(strings.Replace(body, "%n", tokens, 1)))
		if assert.NoError(t, err) {
			t.Cleanup(func() { _ = resp.Body.Close() })
		}
	}
	for range 4 {
		ask(busy.URL(), "600")
	}
	g.shows(`pd_engine_requests_running{gen_ai_request_model="tiny",pd_role="decode"} 4`)
	direct := busy.Stats().Requests
	for range 6 {
		status, _, answer := g.complete(strings.Replace(strings.Replace(body, "%n", "2", 1), `,"stream":true`, "", 1))
		require.Equal(t, http.StatusOK, status, answer)
	}
	assert.Equal(t, direct, busy.Stats().Requests)
	assert.EqualValues(t, 6, idle.Stats().Requests)
}
