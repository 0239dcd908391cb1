// SPDX-License-Identifier: Apache-2.0

package trtllm_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
)

// setups are connectors whose P responds with 512 token ids and 1 KiB of state.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	state := strings.Repeat("Ab+/", 256)
	response := connectortest.Response{
		Body: []byte(`{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","prompt_token_ids":[` +
			strings.Repeat("15043,", 511) + `2],"usage":{"prompt_tokens":512,"total_tokens":513,` +
			`"completion_tokens":1},` +
			`"choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"length",` +
			`"disaggregated_params":{"request_type":"context_only","first_gen_tokens":[278],` +
			`"ctx_request_id":4611686018427387904,"disagg_request_id":4611686018427387904,"encoded_opaque_state":"` +
			state + `"}}]}`)}
	s := func() *connector.Session { return session(t, connector.APIChat, connectortest.Chat2KB()) }
	generation, prepared := open(t, `{"dispatch":"generation-first"}`), s()
	p, ok := connector.As[connector.Preparer](generation)
	require.True(t, ok)
	v, err := p.Prepare(
		t.Context(), prepared,
		(&server{status: http.StatusOK, body: `{"disaggregated_params":{"ctx_info_endpoint":"tcp://10.0.0.1:5000",` +
			`"encoded_opaque_state":"` + state + `"}}`}).call,
	)
	require.NoError(t, err)
	prepared.Prepared = v
	return []connectortest.Measured{
		{Connector: open(t, ``), Session: s(), Response: response},
		{Name: "trtllm/signed", Connector: open(t, `{"authKey":"k"}`), Session: s(), Response: response},
		{Name: "trtllm/generation-first", Connector: generation, Session: prepared, Response: response},
	}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
