// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// A decode engine answers 200 and ends with finish_reason "error", as with KV that it could not load: clients get the
// response of another one, or 502 if there is none, or a stream that no client takes for whole.
func TestAnEndThatIsAnErrorIsNotServed(t *testing.T) {
	p, d := startPair(t)
	_, other := startPair(t)
	g := start(t, gatewayYAML("")+simYAML("", p, d, nil, other))
	for _, stream := range []string{"", `,"stream":true`} {
		body := `{"model":"tiny","prompt":"a","max_tokens":12` + stream + `}`
		fails := enginesim.Fault{Kind: enginesim.FaultEnding, Ending: "error", Leg: enginesim.LegDecode}
		d.Inject(fails)
		for range 4 {
			status, _, got := do(t, http.MethodPost, g.client+"/v1/completions", body)
			assert.Equal(t, 200, status)
			assert.Contains(t, got, `"finish_reason":"length"`)
			assert.NotContains(t, got, `"error"`)
		}
		for _, e := range []*enginesim.Engine{d, other} {
			e.ClearFaults()
			e.Inject(enginesim.Fault{Kind: fails.Kind, Ending: fails.Ending, Leg: fails.Leg, Count: -1})
		}
		status, _, got := do(t, http.MethodPost, g.client+"/v1/completions", body)
		assert.Equal(t, 502, status, got)
		assert.Contains(t, got, `"code":"decode_failed"`)
		for _, e := range []*enginesim.Engine{d, other} {
			e.ClearFaults()
		}
	}
	g.shows(`error_type="decode_failed"`)
}

func TestAStreamThatEndsWithAnErrorIsCut(t *testing.T) {
	p, d := simPair(t, enginesim.Config{}, enginesim.Config{ITL: 20 * time.Millisecond})
	g := start(t, gatewayYAML("")+simYAML("", p, d))
	for path, body := range map[string]string{
		"/v1/completions":      `{"model":"tiny","stream":true,"prompt":"a","max_tokens":12}`,
		"/v1/chat/completions": `{"model":"tiny","stream":true,"messages":[{"role":"user","content":"a"}]}`,
		"/v1/messages": `{"model":"tiny","stream":true,"max_tokens":9,` +
			`"messages":[{"role":"user","content":"a"}]}`,
		"/v1/responses": `{"model":"tiny","stream":true,"input":"a","metadata":{"status":"completed"}}`,
	} {
		d.Inject(enginesim.Fault{Kind: enginesim.FaultEnding, Leg: enginesim.LegDecode, AfterChunks: 4})
		resp, err := http.Post(g.client+path, "application/json", strings.NewReader(body))
		require.NoError(t, err)
		got, err := io.ReadAll(resp.Body)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, 200, resp.StatusCode)
		assert.Error(t, err, "%s is cut: %s", path, got)
		for _, end := range []string{"[DONE]", "message_stop", "response.completed"} {
			assert.NotContains(t, string(got), end, path)
		}
	}
	g.shows(`error_type="stream_broken"`)
}
