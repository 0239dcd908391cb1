// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

// hybrid is a gateway with lines of its ModelServer's spec, over a pair of engines and others.
func hybrid(t *testing.T, prefill, decode enginesim.Config, spec string, others ...string) (x pairOf) {
	t.Helper()
	x.p, x.d = simPair(t, prefill, decode)
	x.alone = newSim(t, enginesim.Config{})
	x.gateway = start(t, gatewayYAML("")+serverYAML("tiny", spec, append(others,
		entry(x.p.URL(), "prefill", nil), entry(x.d.URL(), "decode", nil))...))
	return x
}

// served sends a request that no engine has seen, and wants the text of one engine alone.
func (x pairOf) served(t *testing.T, n int, stream bool, header ...string) (mode string) {
	t.Helper()
	request := body(connector.APICompletions, n, stream)
	status, h, response := x.gateway.complete(request, header...)
	require.Equal(t, http.StatusOK, status, "%s\n%s", response, x.gateway.log)
	_, _, want := do(t, http.MethodPost, x.alone.URL()+"/v1/completions", request)
	require.NotEmpty(t, texts(t, want))
	assert.Equal(t, texts(t, want), texts(t, response))
	return h.Get("X-PD-Mode")
}

// clean waits for the engines, and wants each handoff used once and no KV lost.
func (x pairOf) clean(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, x.p.WaitIdle(ctx))
	require.NoError(t, x.d.WaitIdle(ctx))
	assert.NoError(t, x.p.CheckKV(), "prefill engine")
	assert.NoError(t, x.d.CheckKV(), "decode engine")
}

const nixlLMCacheHTTP = `  kvConnector:
    type: nixl
    retry: {maxAttempts: 1}
    fallback: connector
    fallbackConnector:
      type: lmcache
      retry: {maxAttempts: 1}
      fallback: connector
      fallbackConnector: {type: http, retry: {maxAttempts: 1}}
`

// The design documents' hybrid: NIXL where the engines have it, else LMCache's store, else two requests without any
// transfer.
func TestAFallbackChainOfConnectors(t *testing.T) {
	shared := map[string]string{"store": t.TempDir(), "hash_seed": "0"}
	store := enginesim.Config{Connector: "lmcache", KVRole: enginesim.RoleBoth, Extra: shared}
	failing := func(times int) enginesim.Fault {
		return enginesim.Fault{Kind: enginesim.FaultStatus, Status: http.StatusInternalServerError, Count: times}
	}
	for i, c := range []struct {
		rule   string
		engine enginesim.Config
		broken int // prefill legs that fail
		mode   string
		legs   int // that P got
		reused bool
	}{
		{"engines of NIXL: the first serves", enginesim.Config{}, 0, "disaggregated", 1, true},
		{"engines of LMCache: the second serves, and D takes over", store, 0, "fallback", 2, true},
		{"two prefill legs fail: the third serves", enginesim.Config{Connector: "none"}, 2, "fallback", 3, false},
	} {
		t.Run(c.rule, func(t *testing.T) {
			for _, stream := range []bool{false, true} {
				x := hybrid(t, c.engine, c.engine, nixlLMCacheHTTP)
				if c.broken > 0 {
					x.p.Inject(failing(c.broken))
				}
				assert.Equal(t, c.mode, x.served(t, 100+i, stream))
				assert.Equal(t, c.legs, len(x.p.Requests())) //nolint:testifylint // Len prints the bodies
				assert.Equal(t, c.reused, x.d.Stats().ExternalKVTransfer > 0)
				if c.reused { // http moves nothing, which the ledger tells
					x.clean(t)
				}
			}
		})
	}
	t.Run("all fail", func(t *testing.T) {
		x := hybrid(t, enginesim.Config{}, enginesim.Config{}, nixlLMCacheHTTP)
		x.p.Inject(failing(3))
		status, _, response := x.gateway.complete(body(connector.APICompletions, 1, false))
		assert.Equal(t, http.StatusBadGateway, status, response)
		assert.Empty(t, x.d.Requests())
		x.clean(t)
	})
}

// A rollout of NIXL beside a store, over engines that do both: each request is wholly one connector's, its id decides
// which, and all prompts are taken over.
func TestARolloutOfTwoKVConnectors(t *testing.T) {
	both := enginesim.Config{Connector: "multi", KVRole: enginesim.RoleBoth,
		Extra: map[string]string{"shared_storage_path": t.TempDir()}}
	x := hybrid(t, both, both, "  kvConnector: {type: sharedstorage}\n  rollout: {weight: 50, kvConnector: {type: "+
		"nixl}}\n")
	byNIXL := map[string]bool{}
	const ids = 24
	for n := range 2 * ids {
		id := fmt.Sprintf("request-%d", n%ids)
		assert.Equal(t, "disaggregated", x.served(t, 200+n, n%3 == 0, "X-Request-Id", id))
		p := x.p.Requests()
		nixl := strings.Contains(string(p[len(p)-1].Body), "do_remote_decode")
		d := x.d.Requests()
		assert.Equal(t, nixl, strings.Contains(string(d[len(d)-1].Body), "do_remote_prefill"),
			"both legs are of one connector")
		if n >= ids {
			assert.Equal(t, byNIXL[id], nixl, "%s goes the same way again", id)
		}
		byNIXL[id] = nixl
	}
	share := 0
	for _, nixl := range byNIXL {
		if nixl {
			share++
		}
	}
	assert.InDelta(t, ids/2, share, ids/3, "about half")
	stats := x.d.Stats()
	assert.Greater(t, stats.ExternalKVTransfer, stats.PromptTokens*8/10)
	x.clean(t)
}

func hybridProtocols() (rows []protocol) {
	// Connector http leaves everything to the engines: with a store in common, it is enough.
	rows = append(rows, protocol{connector: "http", apis: vllmAPIs,
		prepare: func(t *testing.T, c *protocol) {
			sharedFolder(nil)(t, c)
			c.prefill.Connector, c.decode.Connector = "sharedstorage", "sharedstorage"
		},
		broken: map[string]broken{
			"two folders": {func(t *testing.T, c *protocol) {
				c.decode.Extra = map[string]string{"shared_storage_path": t.TempDir()}
			}, reuse.NotReused, "connector http relays nothing"},
			"engines of NIXL": {func(_ *testing.T, c *protocol) {
				c.prefill, c.decode = enginesim.Config{Connector: "nixl"}, enginesim.Config{Connector: "nixl"}
			}, reuse.NotReused, "connector http relays nothing"},
		},
	})
	return rows
}
