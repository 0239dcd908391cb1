// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/passthrough"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Both legs of a chat of 2 KB, beside those of the connector http, which edits least. The budget is 5 µs and 10 allocations per leg more.
func BenchmarkLegs(b *testing.B) {
	mine := newConnector(b, nil)
	r, err := connector.ParseRequest(connector.APIChat, []byte(`{"model":"m","messages":[{"role":"user","content":"`+strings.Repeat("x", 2000)+`"}],"stream":true,"max_tokens":64}`))
	require.NoError(b, err)
	s := connector.NewSession(r, "id", endpoint(b, "http://10.0.0.1:8100", discovery.RolePrefill), discovery.Endpoint{})

	http, err := passthrough.New(nil)
	require.NoError(b, err)
	for _, c := range []connector.KVConnector{http, mine} {
		for _, leg := range []string{"prefill", "decode"} {
			b.Run(c.Name()+"/"+leg, func(b *testing.B) {
				b.ReportAllocs()
				var body jsonedit.Segments
				for b.Loop() {
					l := connector.NewLeg(s.Request)
					if leg == "prefill" {
						err = c.Prefill(b.Context(), s, l)
					} else {
						err = c.Decode(b.Context(), s, nil, l)
					}
					if err == nil {
						err = l.Splice(&body)
					}
					if err != nil {
						b.Fatal(err)
					}
					body.Reset()
				}
			})
		}
	}
}
