// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

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
		g := start(t, gatewayYAML("")+fmt.Sprintf(`apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
spec:
  model: m
  rollout: {weight: %d, kvConnector: {type: nixl}}
  discovery:
    static:
      endpoints:
      - {url: %q, role: prefill, attributes: {tpSize: "2"}}
      - {url: %q, role: decode, attributes: {tpSize: "3"}}
`, weight, p.URL, d.URL))
		require.Eventually(t, func() bool {
			status, _, body := do(t, http.MethodGet, g.admin+"/readyz", "")
			return status == want && (status == http.StatusOK || strings.Contains(body, "tpSize"))
		}, 20*time.Second, 10*time.Millisecond)
	}
}

// An engine that no pair can be made with fails no request, and its operator hears why.
func TestEnginesWithoutWhatTheConnectorNeedsAreTold(t *testing.T) {
	file := filepath.Join(t.TempDir(), "engines.yaml")
	lists(t, file, fmt.Sprintf(`endpoints:
- {url: %q, role: prefill, attributes: {zmqAddress: "127.0.0.1:2"}}
- {url: %q, role: prefill, attributes: {zmqAdress: "127.0.0.1:2"}}
- {url: %q, role: decode, attributes: {zmqAdress: "127.0.0.1:2"}}
`, newEngine(t).URL, newEngine(t).URL, newEngine(t).URL))
	g := start(t, gatewayYAML("")+`apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
spec: {model: m, kvConnector: {type: p2pnccl}, discovery: {file: {path: `+file+`}}}
`)
	require.Eventually(t, func() bool {
		return strings.Contains(g.log.String(), "engines are left out of pairs") &&
			strings.Contains(g.log.String(), "zmqAddress") && strings.Contains(g.log.String(), "others=1")
	}, 20*time.Second, time.Millisecond, "%s", g.log)
	status, _, body := do(t, http.MethodGet, g.admin+"/readyz", "")
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.Contains(t, body, "attributes that the connector needs")
}

func TestEnginesAreAskedForWhatTheirListLacks(t *testing.T) {
	p, d := newEngine(t), newEngine(t)
	start(t, gatewayYAML("")+pairYAML("m", p, d, ""), "-inspect", "1h")
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
	require.Eventually(t, func() bool { return asked(p) && asked(d) }, 20*time.Second, 10*time.Millisecond)

	code, _, stderr := check(t, "-config", write(t, gatewayYAML("")+pairYAML("m", p, d, "")), "-inspect", "-1s")
	assert.Equal(t, exitWrong, code)
	assert.Contains(t, stderr, "-inspect: is negative")
}
