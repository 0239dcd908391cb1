// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMember(t *testing.T) {
	fine := func(json.RawMessage) error { return nil }
	response := func(body string) *connector.PrefillResult {
		return &connector.PrefillResult{Status: http.StatusOK, Body: []byte(body)}
	}
	raw, err := handoff.Member(response(`{"kv_transfer_params" : { "a":1 } }`), connector.ParamsMember, fine)
	require.NoError(t, err)
	assert.Equal(t, `{ "a":1 }`, string(raw), "to the byte")
	for _, p := range []*connector.PrefillResult{nil, response(``), response(`<html>planted</html>`), response(`[]`),
		response(`[{"kv_transfer_params":{}}]`), response("data: {}\n\n"), response(`{"kv_transfer_params":{}`),
		response(`{"kv_transfer_params":{}}planted`), response(`{}`), response(`{"kv_transfer_params":null}`),
		response(`{"kv_transfer_params":{},"kv_transfer_params":{}}`),
		response(`{"a":1,"a":2,"kv_transfer_params":{}}`),
		response(`{"choices":[{"kv_transfer_params":{}}]}`)} { // the last is where nobody reads it
		_, err := handoff.Member(p, connector.ParamsMember, fine)
		require.ErrorIs(t, err, connector.ErrNoTransfer)
		assert.NotContains(t, err.Error(), "planted")
	}
	_, err = handoff.Member(response(`{"kv_transfer_params":{}}`), connector.ParamsMember,
		func(json.RawMessage) error { return errors.New("own") })
	require.ErrorIs(t, err, connector.ErrNoTransfer)
	require.ErrorContains(t, err, "own")
}

func TestHeader(t *testing.T) {
	response := func(values ...string) *connector.PrefillResult {
		return &connector.PrefillResult{Status: http.StatusOK, Header: http.Header{"X-Kv-Ticket": values}}
	}
	got, err := handoff.Header(response("t-1"), "X-KV-Ticket")
	require.NoError(t, err)
	assert.Equal(t, "t-1", got)
	for _, p := range []*connector.PrefillResult{nil, response(), response(""), response("planted", "b"),
		response("planted\x00"), response("planted é"), response(strings.Repeat("planted", 8<<10))} {
		_, err := handoff.Header(p, "X-KV-Ticket")
		require.ErrorIs(t, err, connector.ErrNoTransfer)
		assert.NotContains(t, err.Error(), "planted", "errors hold no values")
	}
}
