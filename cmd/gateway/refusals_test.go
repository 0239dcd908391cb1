// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// One client sends one bad request 20 times: each time the answer is prefill's own, decode is never asked, and after
// eight refusals in a row by one engine the next one is also asked for, once: see docs/retries.md.
func TestABadRequestIsRefusedByTheFirstEngineHoweverOftenItComes(t *testing.T) {
	p1, d1 := startPair(t)
	p2, d2 := startPair(t)
	const text = `{"error":{"message":"temperature is wrong","type":"BadRequestError","param":null,"code":422}}`
	for _, p := range []*enginesim.Engine{p1, p2} {
		p.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 422, Body: text, Count: -1,
			Header: http.Header{"Retry-After": {"7"}}})
	}
	g := start(t, gatewayYAML("")+simYAML("  kvConnector: {type: nixl, retry: {maxAttempts: 4, budget: 1}}\n", p1, d1,
		p2, d2))
	asked := func() int { return len(p1.Requests()) + len(p2.Requests()) }
	more := 0
	for range 20 {
		before := asked()
		status, h, body := g.complete(`{"model":"tiny","prompt":"hi","temperature":99}`)
		require.Equal(t, 422, status)
		require.JSONEq(t, text, body)
		require.Equal(t, "7", h.Get("Retry-After"))
		require.LessOrEqual(t, asked()-before, 2)
		more += asked() - before - 1
	}
	assert.LessOrEqual(t, more, 2)
	assert.Empty(t, d1.Requests())
	assert.Empty(t, d2.Requests())
}
