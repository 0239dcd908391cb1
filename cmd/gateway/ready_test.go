// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
)

// stored is a connector whose store can be lost.
type stored struct {
	connector.KVConnector
	lost *atomic.Bool
}

func (s stored) HealthCheck(context.Context) error {
	if s.lost.Load() {
		return errors.New("the store does not answer")
	}
	return nil
}

func TestAModelWhoseConnectorFailsIsNotReady(t *testing.T) {
	p, d := newEngine(t), newEngine(t)
	cfg, err := parse("config.yaml", []byte(gatewayYAML("")+pairYAML("m", p, d, "")+pairYAML("n", p, d, "")))
	require.NoError(t, err)
	var lost atomic.Bool
	cfg.models[0].Main.KVConnector = stored{cfg.models[0].Main.KVConnector, &lost}
	tel, err := newTelemetry(t.Context(), false, "")
	require.NoError(t, err)
	g, err := build(cfg, tel, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	wait, err := g.start(ctx)
	require.NoError(t, err)
	defer wait()
	defer stop()
	readyz := func() (int, string) {
		w := httptest.NewRecorder()
		g.admin().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		return w.Code, w.Body.String()
	}
	eventually(t, func() bool { status, _ := readyz(); return status == http.StatusOK })
	lost.Store(true)
	status, body := readyz()
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.JSONEq(t, `{"ready":false,"models":[
		{"model":"m","ready":false,"reason":"connector http: the store does not answer"},
		{"model":"n","ready":true}]}`, body)
	lost.Store(false)
	status, body = readyz()
	assert.Equal(t, http.StatusOK, status, body)
}
