// SPDX-License-Identifier: Apache-2.0

package trtllm_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/passthrough"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// BenchmarkLegs describes both legs of a chat of 2 KiB, whose answer holds 512 token ids and 1 KiB of state, against passthrough. The budget over
// that is 5 µs and 10 allocations a leg.
func BenchmarkLegs(b *testing.B) {
	body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 390) + `"}],"max_tokens":64,"stream":true}`
	state := strings.Repeat("Ab+/", 256)
	answer := []byte(`{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","prompt_token_ids":[` + strings.Repeat("15043,", 511) + `2],"usage":{"prompt_tokens":512,"total_tokens":513,"completion_tokens":1},` +
		`"choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"length","disaggregated_params":{"request_type":"context_only","first_gen_tokens":[278],"ctx_request_id":4611686018427387904,"disagg_request_id":4611686018427387904,"encoded_opaque_state":"` + state + `"}}]}`)
	plain, err := passthrough.New(nil)
	require.NoError(b, err)
	bench := func(name string, c connector.KVConnector, known string) {
		b.Run(name, func(b *testing.B) {
			s := session(b, connector.APIChat, body)
			if p, ok := c.(connector.Preparer); ok {
				v, err := p.Prepare(b.Context(), s, (&server{status: http.StatusOK, body: known}).call)
				require.NoError(b, err)
				s.SetPrepared(v)
			}
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
				if c.Decode(ctx, s, connector.NewPrefillResult(http.StatusOK, nil, answer, time.Time{}), leg) != nil || leg.Splice(&out) != nil {
					b.Fatal("decode")
				}
				out.Reset()
			}
		})
	}
	bench("http", plain, "")
	bench("trtllm", open(b, ``), "")
	bench("trtllm signed", open(b, `{"authKey":"k"}`), "")
	bench("trtllm generation first", open(b, `{"dispatch":"generation-first"}`), `{"disaggregated_params":{"ctx_info_endpoint":"tcp://10.0.0.1:5000","encoded_opaque_state":"`+state+`"}}`)
}
