// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
)

// A health probe's result holds only for the probed engine, not for another one that gets the same ID later, and only
// for a limited time.
func TestProbesOfEnginesThatLeaveAreForgotten(t *testing.T) {
	engine := func(id, url string) discovery.Endpoint {
		e, err := discovery.New(url, discovery.RoleDecode)
		require.NoError(t, err)
		e.ID = id
		return e
	}
	b := &probeBook{log: slog.New(slog.DiscardHandler)}
	a, moved, other := engine("a", "http://10.0.0.1:8000"), engine("a", "http://10.0.0.2:8000"),
		engine("b", "http://10.0.0.3:8000")
	b.observe("a", false, errors.New("refused"))
	b.observe("b", false, errors.New("refused"))
	b.keep([]discovery.Endpoint{a, other})
	assert.False(t, b.of("a").healthy)
	b.keep([]discovery.Endpoint{moved, other})
	assert.True(t, b.of("a").healthy, "a pod came back under its name, at another address")
	assert.False(t, b.of("b").healthy)
	b.keep(nil)
	assert.Empty(t, b.failed)
}

// If a rollout's engines form no pair, the rollout's share of the requests fails, so the model is not ready. A share of
// 0 does not matter.
func TestReadinessAsksForEachFlowThatRequestsReach(t *testing.T) {
	p, d := newEngine(t), newEngine(t)
	for weight, want := range map[int]int{50: http.StatusServiceUnavailable, 0: http.StatusOK} {
		g := start(t, gatewayYAML("")+serverYAML("m",
			fmt.Sprintf("  rollout: {weight: %d, kvConnector: {type: nixl}}\n", weight),
			entry(p.URL, "prefill", attributes{"tpSize": "2"}), entry(d.URL, "decode", attributes{"tpSize": "3"})))
		eventually(t, func() bool {
			status, body := g.ready()
			return status == want && (status == http.StatusOK || strings.Contains(body, "tpSize"))
		})
	}
}

// An engine that no pair can be made with fails no request, and its operator hears why.
func TestEnginesWithoutWhatTheConnectorNeedsAreTold(t *testing.T) {
	misspelt := attributes{"zmqAdress": "127.0.0.1:2"}
	g := start(t, gatewayYAML("")+serverYAML("m", "  kvConnector: {type: p2pnccl}\n"+listIn(t,
		entry(newEngine(t).URL, "prefill", attributes{"zmqAddress": "127.0.0.1:2"}),
		entry(newEngine(t).URL, "prefill", misspelt), entry(newEngine(t).URL, "decode", misspelt))))
	eventually(t, func() bool {
		return strings.Contains(g.log.String(), "engines are left out of pairs") &&
			strings.Contains(g.log.String(), "zmqAddress") && strings.Contains(g.log.String(), "others=1")
	}, "%s", g.log)
	status, body := g.ready()
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.Contains(t, body, "attributes that the connector needs")
}

func TestEnginesAreAskedForWhatTheirListLacks(t *testing.T) {
	_, p, d := startHTTP(t, "", "", "-inspect", "1h")
	asked := func(e *engine) bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		for _, s := range e.seen {
			if s.path == "/version" {
				return true
			}
		}
		return false
	}
	eventually(t, func() bool { return asked(p) && asked(d) })
}
