// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Whatever the engine sends that is to go on with a stream, the client gets the beginning of the undisturbed stream and
// a visible cut, and nothing of the engine's.
func TestAnEngineThatGoesOnWronglyCutsTheStream(t *testing.T) {
	t.Parallel()
	sse := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, text)
		}
	}
	chunk := func(choice string) string {
		return `data: {"id":"evil","object":"text_completion","model":"m","choices":[` + choice + `]}` + "\n\n"
	}
	const done = "data: [DONE]\n\n"
	for name, d := range map[string]http.HandlerFunc{
		"a whole response": answerJSON(`{"id":"evil","choices":[{"index":0,"text":"evil"}]}`),
		"no type": func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["Content-Type"] = nil
			_, _ = io.WriteString(w, chunk(`{"index":0,"text":"evil","token_ids":[1]}`)+done)
		},
		"no token ids":      sse(chunk(`{"index":0,"text":"evil"}`) + done),
		"token ids of text": sse(chunk(`{"index":0,"text":"evil","token_ids":["a"]}`) + done),
		"another choice":    sse(chunk(`{"index":1,"text":"evil","token_ids":[1]}`) + done),
		"no JSON":           sse("data: evil\n\n" + done),
		"an error":          sse(`data: {"error":{"message":"evil","code":500}}` + "\n\n" + done),
		"nothing":           sse(""),
		"only the end":      sse(done),
		"a large event":     sse("data: " + strings.Repeat("evil", 8<<20)),
		"silence": func(_ http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
		},
		"refusal": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "evil", http.StatusBadRequest) },
	} {
		t.Run(name, func(t *testing.T) {
			x := start(t, setup{decode: enginesim.Config{KVRole: enginesim.RoleConsumer}})
			conn, err := nixl.New(nil)
			require.NoError(t, err)
			evil := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				d(w, r)
			}))
			flow, err := pdflow.New(conn, pick.Func(inTurn{endpoint(t, x.p.URL(), discovery.RolePrefill),
				[]discovery.Endpoint{endpoint(t, x.d.URL(), discovery.RoleDecode),
					endpoint(t, evil, discovery.RoleDecode)}}.Pick),
				pdflow.WithRescue(2), pdflow.WithTimeouts(config.Timeouts{Decode: 3 * time.Second}),
				pdflow.WithRetry(config.Retry{MaxAttempts: 1}))
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, flow.Shutdown(context.Background())) })
			url := serve(t, flow)
			c := rescueCases(9)[0]
			want := post(t, url, c.path, c.body, "X-Request-Id", "same")
			require.NoError(t, want.err)
			require.Equal(t, http.StatusOK, want.status, want.body)
			x.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 3})
			got := post(t, url, c.path, c.body, "X-Request-Id", "same")
			assert.NotContains(t, got.body, "evil")
			assert.True(t, strings.HasPrefix(sameOf(want.body), sameOf(got.body)), "%q", got.body)
			assert.Error(t, got.err, "the stream looks whole: %q", got.body)
		})
	}
}

func answerJSON(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, body)
	}
}
