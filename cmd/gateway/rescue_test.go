// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// The decode engine dies after some events of a greedy stream. With spec.rescue the client's text is whole; without it
// the stream is cut, and the client can tell.
func TestAStreamIsRescuedWhereItsModelServerSaysSo(t *testing.T) {
	const body = `{"model":"tiny","prompt":"a stream outlives it","max_tokens":12,"temperature":0,"stream":true}`
	for spec, whole := range map[string]bool{"": false, "  rescue: {mode: on}\n": true} {
		t.Run(fmt.Sprint("rescued ", whole), func(t *testing.T) {
			p, d := startPair(t)
			_, other := startPair(t)
			_, _, want := do(t, http.MethodPost, other.URL()+"/v1/completions", body)
			d.Inject(enginesim.Fault{Kind: enginesim.FaultKill, Leg: enginesim.LegDecode, AfterChunks: 4})
			var got string
			var cut bool
			g := start(t, gatewayYAML("")+simYAML(spec, p, d, nil, other))
			for range 5 { // until the engine that dies is chosen
				if d.Dead() {
					break
				}
				resp, err := http.Post(g.client+"/v1/completions", "application/json", strings.NewReader(body))
				require.NoError(t, err)
				data, err := io.ReadAll(resp.Body)
				require.NoError(t, resp.Body.Close())
				got = string(data)
				cut = err != nil || !strings.HasSuffix(got, "data: [DONE]\n\n")
			}
			require.True(t, d.Dead())
			require.Equal(t, !whole, cut, got)
			if cut {
				return
			}
			assert.Equal(t, texts(t, want), texts(t, got))
			assert.Equal(t, 1, strings.Count(got, "[DONE]"), got)
			assert.Regexp(t, `pd_rescues_total\{.*pd_result="rescued".*\} 1\n`, g.page("/metrics"))
		})
	}
}
