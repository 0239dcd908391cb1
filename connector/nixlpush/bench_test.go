// SPDX-License-Identifier: Apache-2.0

package nixlpush_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixlpush"
	"github.com/pdkit/pdkit/connector/passthrough"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// legs describes both legs of a chat of 2 KiB, as the flow does.
func legs(t testing.TB, c connector.KVConnector) (prefill, decode func()) {
	t.Helper()
	body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 390) + `"}],"max_tokens":64,"stream":true}`
	s := session(t, connector.APIChat, body, attributes())
	var p *connector.PrefillResult
	if c.Order() != connector.Together {
		p = connector.NewPrefillResult(http.StatusOK, nil, []byte(`{"id":"chatcmpl-1","kv_transfer_params":`+handoff(s)+`}`), time.Now())
	}
	ctx := context.Background()
	var out jsonedit.Segments
	prefill = func() {
		leg := connector.NewLeg(s.Request)
		if c.Prefill(ctx, s, leg) != nil || leg.Splice(&out) != nil {
			t.Fatal("prefill")
		}
		out.Reset()
	}
	decode = func() {
		leg := connector.NewLeg(s.Request)
		if c.Decode(ctx, s, p, leg) != nil || leg.Splice(&out) != nil {
			t.Fatal("decode")
		}
		out.Reset()
	}
	return prefill, decode
}

func plainConnector(t testing.TB) connector.KVConnector {
	t.Helper()
	c, err := passthrough.New(nil)
	require.NoError(t, err)
	return c
}

// The budget over passthrough is 5 µs and 10 allocations a leg.
func BenchmarkLegs(b *testing.B) {
	for i, c := range []connector.KVConnector{plainConnector(b), open(b, nil), open(b, &nixlpush.Options{Dispatch: "serial"})} {
		prefill, decode := legs(b, c)
		for name, leg := range map[string]func(){"prefill": prefill, "decode": decode} {
			b.Run(c.Name()+[]string{"", "", "-serial"}[i]+"/"+name, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					leg()
				}
			})
		}
	}
}

func TestLegsKeepTheBudgetOfAllocations(t *testing.T) {
	plainPrefill, plainDecode := legs(t, plainConnector(t))
	for _, dispatch := range []string{"together", "serial"} {
		prefill, decode := legs(t, open(t, &nixlpush.Options{Dispatch: dispatch}))
		const runs = 100
		assert.LessOrEqual(t, testing.AllocsPerRun(runs, prefill), testing.AllocsPerRun(runs, plainPrefill)+10, dispatch)
		assert.LessOrEqual(t, testing.AllocsPerRun(runs, decode), testing.AllocsPerRun(runs, plainDecode)+10, dispatch)
	}
}
