// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/internal/builttest"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

// realGateway starts cmd/gateway with two prefill and three decode engines. Some streams of one of these break off
// if it is asked for. It returns the addresses for clients and for operators.
func realGateway(t *testing.T, breaks int) (client, admin string) {
	t.Helper()
	program := builttest.Program(t, "gateway")
	engines := ""
	for i := range 3 {
		p, d, err := enginesim.Pair(enginesim.Config{PrefillRate: 600},
			enginesim.Config{ITL: time.Duration(6+3*i) * time.Millisecond})
		require.NoError(t, err)
		t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
		engines += fmt.Sprintf("        - {url: %q, role: decode, group: a}\n", d.URL())
		if i < 2 {
			engines += fmt.Sprintf("        - {url: %q, role: prefill, group: a}\n", p.URL())
		} else if breaks > 0 {
			d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 8,
				Count: breaks})
		}
	}
	client, admin = freeAddress(t), freeAddress(t)
	file := filepath.Join(t.TempDir(), "gateway.yaml")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, `apiVersion: pdkit.dev/v1alpha1
kind: Gateway
spec: {listen: %q, admin: %q}
---
apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
spec:
  model: tiny
  kvConnector: {type: nixl, config: {leaseDuration: 30s}}
  admission: {mode: fixed, inFlightPerPrefill: 8, inFlightPerDecode: 32}
  discovery:
    static:
      endpoints:
%s`, client, admin, engines), 0o600))
	ctx, stop := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, program, "-config", file, "-inspect", "200ms")
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { stop(); _ = cmd.Wait(); http.DefaultClient.CloseIdleConnections() })
	require.Eventually(t, func() bool {
		resp, err := http.Get("http://" + admin + "/readyz")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil && resp.StatusCode == http.StatusOK
	}, 30*time.Second, 50*time.Millisecond)
	return "http://" + client, "http://" + admin
}

func freeAddress(t *testing.T) string {
	t.Helper()
	port, err := freeport.Find(1)
	require.NoError(t, err)
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}
