// SPDX-License-Identifier: Apache-2.0

package sglang_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/passthrough"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// BenchmarkLegs describes both legs of a chat of 2 KiB, against passthrough. The budget over that is 5 µs and 10 allocations a leg.
func BenchmarkLegs(b *testing.B) {
	body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 390) + `"}],"max_tokens":64,"stream":true}`
	plain, err := passthrough.New(nil)
	require.NoError(b, err)
	for _, c := range []connector.KVConnector{plain, open(b, ``)} {
		b.Run(c.Name(), func(b *testing.B) {
			s := session(b, connector.APIChat, body, nil)
			ctx := context.Background()
			var out jsonedit.Segments
			b.ReportAllocs()
			for b.Loop() {
				leg := connector.NewLeg(s.Request)
				if c.Prefill(ctx, s, leg) != nil || leg.Splice(&out) != nil {
					b.Fatal("prefill")
				}
				out.Reset()
				leg = connector.NewLeg(s.Request)
				if c.Decode(ctx, s, nil, leg) != nil || leg.Splice(&out) != nil {
					b.Fatal("decode")
				}
				out.Reset()
			}
		})
	}
}
