// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net/http"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// A client whose prefill is slow gets the head in time, and then its stream. A prefill that fails only then is an error
// event behind status 200, and operators see the error itself: in the log and in the metrics.
func TestAClientIsKeptAliveWhilePrefillIsSlow(t *testing.T) {
	g, p, _ := startSim(t, "  keepAlive: {after: 100ms}\n  kvConnector:\n    type: nixl\n    timeouts: {prefill: 1s}\n"+
		"    retry: {maxAttempts: 1}\n")
	ask := func() (*http.Response, string) {
		s := g.stream("/v1/completions", `{"model":"tiny","stream":true,"prompt":"a cat","max_tokens":4}`)
		body, _ := io.ReadAll(s.r)
		require.Equal(t, http.StatusOK, s.resp.StatusCode)
		return s.resp, string(body)
	}
	p.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Delay: 500 * time.Millisecond})
	resp, body := ask()
	assert.Contains(t, body, ": keep-alive\n\n: keep-alive\n\n")
	assert.Contains(t, body, "data: [DONE]\n\n")
	assert.Empty(t, resp.Header["X-Pd-Mode"])
	assert.Len(t, resp.Header["X-Request-Id"], 1)

	p.Inject(enginesim.Fault{Kind: enginesim.FaultStall})
	_, body = ask()
	assert.Contains(t, body, `data: {"error":{"code":"timeout"`)
	assert.NotContains(t, body, "[DONE]")
	g.shows(`pd_request_duration_seconds_count{error_type="timeout"`)
	eventually(t, func() bool {
		return regexp.MustCompile(`msg="request failed".* error.code=timeout`).MatchString(g.log.String())
	})
	status, _ := g.ready()
	assert.Equal(t, http.StatusOK, status)

	resp, _ = ask() // in time: as without keep-alive
	assert.Equal(t, []string{"disaggregated"}, resp.Header["X-Pd-Mode"])
}
