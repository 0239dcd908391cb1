// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// nixlYAML is a ModelServer over two engines that move KV.
func nixlYAML(p, d *enginesim.Engine) string {
	return fmt.Sprintf(`apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
spec:
  model: tiny
  kvConnector: {type: NixlConnector, config: {leaseDuration: 30s}}
  discovery:
    static:
      endpoints:
        - {url: %q, role: prefill, group: a}
        - {url: %q, role: decode, group: a}
---
`, p.URL(), d.URL())
}

// startPair starts two engines. D's ports are its own, also while it is down.
func startPair(t *testing.T) (p, d *enginesim.Engine) {
	t.Helper()
	p, d, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{Listen: "127.0.0.1:" + unusedPort(t),
		SideChannel: "127.0.0.1:" + unusedPort(t)})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	return p, d
}

// text joins the completion's text of a whole or a streamed response.
func text(t *testing.T, response string) string {
	t.Helper()
	var b strings.Builder
	for line := range strings.Lines(response) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "data: ")
		if line == "" || line == "[DONE]" {
			continue
		}
		var c struct{ Choices []struct{ Text string } }
		require.NoError(t, json.Unmarshal([]byte(line), &c), line)
		for _, choice := range c.Choices {
			b.WriteString(choice.Text)
		}
	}
	return b.String()
}

// The gateway's own job: the text is that of one engine alone, and decode took P's KV over instead of computing it.
func TestDecodeTakesThePrefillEnginesKVOver(t *testing.T) {
	p, d := startPair(t)
	alone, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	defer alone.Close()
	g := start(t, gatewayYAML("")+nixlYAML(p, d))
	for i, stream := range []string{"false", "true"} {
		body := fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":12,"stream":%s}`,
			strings.Repeat(fmt.Sprintf("prompt %d ", i), 40), stream)
		status, h, response := do(t, http.MethodPost, g.client+"/v1/completions", body)
		require.Equal(t, http.StatusOK, status, response)
		assert.Equal(t, "disaggregated", h.Get("X-PD-Mode"))
		_, _, want := do(t, http.MethodPost, alone.URL()+"/v1/completions", body)
		assert.NotEmpty(t, text(t, response))
		assert.Equal(t, text(t, want), text(t, response), "stream %s", stream)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, p.WaitIdle(ctx))
	require.NoError(t, d.WaitIdle(ctx))
	s := d.Stats()
	assert.EqualValues(t, 2, s.Transfers)
	assert.Positive(t, s.ExternalKVTransfer)
	assert.Zero(t, s.FailedTransfers)
	require.NoError(t, p.CheckKV(), "no handoff is left or used twice")
	require.NoError(t, d.CheckKV())
}

func TestAModelWhoseEngineDiesIsNotReady(t *testing.T) {
	t.Parallel()
	p, d := startPair(t)
	g := start(t, gatewayYAML("")+nixlYAML(p, d))
	d.Kill()
	status, _, body := do(t, http.MethodPost, g.client+"/v1/completions",
		`{"model":"tiny","prompt":"x","max_tokens":2}`)
	assert.Contains(t, []int{http.StatusBadGateway, http.StatusServiceUnavailable}, status, body)
	require.Eventually(t, func() bool {
		status, _, body := do(t, http.MethodGet, g.admin+"/readyz", "")
		return status == http.StatusServiceUnavailable && strings.Contains(body, "no decode engine is ready")
	}, 20*time.Second, 50*time.Millisecond)
	status, h, _ := do(t, http.MethodPost, g.client+"/v1/completions", `{"model":"tiny","prompt":"x","max_tokens":2}`)
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.NotEmpty(t, h.Get("Retry-After"))
	require.NoError(t, d.Restart())
	require.Eventually(t, func() bool {
		status, _, _ := do(t, http.MethodPost, g.client+"/v1/completions",
			`{"model":"tiny","prompt":"x","max_tokens":2}`)
		return status == http.StatusOK
	}, 20*time.Second, 50*time.Millisecond, "and comes back by itself")
}
