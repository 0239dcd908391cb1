// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

const nixlConnector = "  kvConnector: {type: NixlConnector, config: {leaseDuration: 30s}}\n"

// simYAML is a ModelServer over simulated engines, P and D in turn; nil leaves one of a pair out. Without a connector
// among the lines of its spec they move KV by NIXL.
func simYAML(spec string, pairs ...*enginesim.Engine) string {
	if !strings.Contains(spec, "  kvConnector:") {
		spec = nixlConnector + spec
	}
	var engines []string
	for i, e := range pairs {
		if e != nil {
			engines = append(engines, entry(e.URL(), []string{"prefill", "decode"}[i%2], nil))
		}
	}
	return serverYAML("tiny", spec, engines...)
}

// startPair starts two engines. D's ports are its own, also while it is down.
func startPair(t *testing.T) (p, d *enginesim.Engine) {
	t.Helper()
	return simPair(t, enginesim.Config{},
		enginesim.Config{Listen: "127.0.0.1:" + unusedPort(t), SideChannel: "127.0.0.1:" + unusedPort(t)})
}

// simPair starts two engines, which end with the test.
func simPair(t *testing.T, prefill, decode enginesim.Config) (p, d *enginesim.Engine) {
	t.Helper()
	p, d, err := enginesim.Pair(prefill, decode)
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	return p, d
}

// startSim starts a gateway over such a pair, with lines of the ModelServer's spec, and flags.
func startSim(t *testing.T, spec string, args ...string) (g *program, p, d *enginesim.Engine) {
	t.Helper()
	p, d = startPair(t)
	return start(t, gatewayYAML("")+simYAML(spec, p, d), args...), p, d
}
