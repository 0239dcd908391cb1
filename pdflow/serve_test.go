// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow"
)

// The main job: one request, two engines, the same text as one engine alone, and the KV really taken over.
func TestOneRequestOverTwoEngines(t *testing.T) {
	for _, c := range []struct{ name, path, body string }{
		{"completions", "/v1/completions", completion(longPrompt, "")},
		{"completions, streamed", "/v1/completions", completion(longPrompt, `"stream":true`)},
		{"chat", "/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"` + longPrompt +
			`"}],"max_tokens":16}`},
		{"chat, streamed", "/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"` +
			longPrompt + `"}],"max_completion_tokens":16,"stream":true,"stream_options":{"include_usage":true}}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := start(t, setup{})
			r := post(t, x.url, c.path, c.body)
			require.Equal(t, alone(t, c.path, c.body), r.text(t))
			require.Equal(t, "disaggregated", r.header.Get("X-PD-Mode"))
			x.idle()
			require.NoError(t, x.p.CheckKV())
			require.NoError(t, x.d.CheckKV())
			require.Positive(t, x.d.Stats().ExternalKVTransfer)
			require.Zero(t, x.d.Stats().LocalCompute)
			o := x.seen.list()
			require.Len(t, o, 1)
			require.Nil(t, o[0].Err)
			require.Equal(t, pdflow.ModeDisaggregated, o[0].Mode)
			require.Equal(t, x.d.Stats().ExternalKVTransfer, o[0].KVTokens)
			require.Positive(t, o[0].HandoffAge)
		})
	}
}
