// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A request goes over both engines, and the decode engine takes the prefill engine's KV over, as the README says.
func TestTheHandlerServesOverBothEngines(t *testing.T) {
	p, d, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{})
	require.NoError(t, err)
	defer d.Close()
	defer p.Close()
	flow := handler(p.URL(), d.URL())
	require.NoError(t, flow.Ready(t.Context()))
	gateway := httptest.NewServer(flow)
	defer gateway.Close()
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		require.NoError(t, flow.Shutdown(ctx))
	}()

	request := strings.NewReader(`{"prompt":"` + strings.Repeat("Hello. ", 20) + `","max_tokens":16}`)
	resp, err := gateway.Client().Post(gateway.URL+"/v1/completions", "application/json", request)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode, "%s", body)
	require.Equal(t, "disaggregated", resp.Header.Get("X-Pd-Mode"))
	require.EqualValues(t, 140, d.Stats().ExternalKVTransfer, "decode computed a prompt that it should have taken over")
	require.NoError(t, d.CheckKV())
}
