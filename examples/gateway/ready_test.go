// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/plainhttp"
)

// stored is a connector whose store can be lost.
type stored struct{ connector.KVConnector }

var storeLost atomic.Bool

func (stored) HealthCheck(context.Context) error {
	if storeLost.Load() {
		return errors.New("the store does not answer")
	}
	return nil
}

func init() {
	connector.Register("stored-for-tests", func(json.RawMessage) (connector.KVConnector, error) {
		c, err := plainhttp.New(nil)
		return stored{c}, err
	})
}

func TestAModelWhoseConnectorFailsIsNotReady(t *testing.T) {
	p, d := newEngine(t), newEngine(t)
	g := start(t, gatewayYAML("")+pairYAML("m", p, d, "  kvConnector: {type: stored-for-tests}\n")+pairYAML("n", p, d, ""))
	status, _, body := do(t, http.MethodGet, g.admin+"/readyz", "")
	assert.Equal(t, http.StatusOK, status, body)
	storeLost.Store(true)
	defer storeLost.Store(false)
	status, _, body = do(t, http.MethodGet, g.admin+"/readyz", "")
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.JSONEq(t, `{"ready":false,"models":[
		{"model":"m","ready":false,"reason":"connector http: the store does not answer"},
		{"model":"n","ready":true}]}`, body)
	storeLost.Store(false)
	status, _, body = do(t, http.MethodGet, g.admin+"/readyz", "")
	assert.Equal(t, http.StatusOK, status, body)
}
