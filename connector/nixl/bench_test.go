// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// BenchmarkLegs is what the flow asks of the connector for both legs of a chat of 2 KB, with P's response of 32 blocks.
func BenchmarkLegs(b *testing.B) {
	c := play.Open(b, nixl.Name, ``)
	s := play.Session(b, connector.APIChat, `{"model":"m","messages":[{"role":"user","content":"`+
		strings.Repeat("word ", 390)+`"}],"max_tokens":64,"temperature":0,"stream":true}`)
	blocks := strings.TrimSuffix(strings.Repeat("1000,", 32), ",")
	p := play.Response(`{"choices":[],"kv_transfer_params":` +
		strings.Replace(good, "[13,14]", "["+blocks+"]", 1) + `}`)
	var body jsonedit.Segments
	b.ReportAllocs()
	for b.Loop() {
		prefill := contract.NewPrefillLeg(s.Request, new(c.Traits()))
		require.NoError(b, c.Prefill(b.Context(), s, prefill))
		require.NoError(b, contract.Leg(prefill).Splice(&body))
		decode := contract.NewLeg(s.Request)
		require.NoError(b, c.Decode(b.Context(), s, p, decode))
		require.NoError(b, contract.Leg(decode).Splice(&body))
	}
}
