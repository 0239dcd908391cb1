// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/nixl"
)

// For any response of P, Decode does not panic. It returns ErrNoTransfer, or a decode leg that is valid JSON and holds
// the response's handoff byte for byte, with every key without which a real D would die or hang.
func FuzzDecode(f *testing.F) {
	for _, response := range []string{
		`{"kv_transfer_params":` + good + `}`,
		`{"id":"x","choices":[],"kv_transfer_params" : {"do_remote_prefill":true,"remote_block_ids":[[1],[]],` +
			`"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":1} }`,
		`{"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1,[2]]]}}`,
		`{"kv_transfer_params":null}`,
		`{"kv_transfer\u005fparams":` + good + `,"a":1}`,
		`{}`, `[]`, ``,
	} {
		f.Add([]byte(response))
	}
	c := play.Open(f, nixl.Name, ``)
	s := play.Session(f, connector.APICompletions, `{"prompt":"x","kv_transfer_params":{"client":1}}`)
	f.Fuzz(func(t *testing.T, response []byte) {
		leg, err := play.TryDecode(c, s, play.Response(string(response)))
		if err != nil {
			require.ErrorIs(t, err, connector.ErrNoTransfer, "%v", err)
			return
		}
		decode := leg.Body
		require.True(t, json.Valid([]byte(decode)), "%s", decode)
		const head, tail = `{"prompt":"x","kv_transfer_params":`, `}`
		handoff := decode[len(head) : len(decode)-len(tail)]
		require.Equal(t, head+handoff+tail, decode)
		var sent map[string]json.RawMessage
		if json.Valid(response) {
			require.NoError(t, json.Unmarshal(response, &sent))
			require.Equal(t, string(sent["kv_transfer_params"]), handoff)
		}
		var h struct {
			DoRemotePrefill bool      `json:"do_remote_prefill"`
			Blocks          [][]int64 `json:"remote_block_ids"`
			Engine          string    `json:"remote_engine_id"`
			Request         string    `json:"remote_request_id"`
			Host            string    `json:"remote_host"`
			Port            uint16    `json:"remote_port"`
		}
		require.NoError(t, json.Unmarshal([]byte(handoff), &h))
		require.True(t, h.DoRemotePrefill)
		require.NotEmpty(t, h.Engine)
		require.NotEmpty(t, h.Request)
		require.NotEmpty(t, h.Host)
		require.NotZero(t, h.Port)
		require.Positive(t, gjson.Get(handoff, "remote_block_ids.@flatten.#").Int())
	})
}
