// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/internal/sharedtest"
	"github.com/pdkit/pdkit/pdflow"
)

// What logs, metrics and traces tell operators, and what they must not contain.

func TestLogsTellFailuresWithoutWhatClientsSent(t *testing.T) {
	out := &sharedtest.Log{}
	logger := slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	x := start(t, setup{opts: []pdflow.Option{logsTo(logger)}})
	post(t, x.url, "/v1/completions", completion("a secret prompt "+longPrompt, ""), "Authorization", "Bearer key",
		"X-Request-Id", "one")
	out.WaitFor(t, "level=DEBUG msg=\"request served\" request_id=one connector=nixl mode=disaggregated")
	x.p.Inject(
		enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Body: `{"error":{"message":"a secret prompt"}}`,
			Count: -1},
	)
	post(t, x.url, "/v1/completions", completion("a secret prompt", ""), "Authorization", "Bearer key", "X-Request-Id",
		"two")
	out.WaitFor(t, "level=WARN msg=\"request failed\" request_id=two")
	require.Contains(t, out.String(), "error.code=prefill_failed error.leg=prefill")
	require.NotContains(t, out.String(), "secret")
	require.NotContains(t, out.String(), "Bearer")
}

func TestErrorsAreWrittenByTheHandlerOfOnesChoice(t *testing.T) {
	var got *pdflow.Error
	x := start(
		t, setup{
			noEndpoints: true,
			opts: []pdflow.Option{
				pdflow.WithErrorHandler(func(w http.ResponseWriter, _ *http.Request, e *pdflow.Error) {
					got = e
					w.WriteHeader(http.StatusTeapot)
				})}})
	require.Equal(t, http.StatusTeapot, post(t, x.url, "/v1/completions", completion("a", "")).status)
	require.ErrorIs(t, got, pdflow.CodeNoEndpoint)
	require.Equal(t, 503, got.HTTPStatus())
	require.ErrorIs(t, got, pdflow.CodeNoEndpoint)
	require.NotContains(t, got.LogValue().String(), "127.0.0.1")
	require.Contains(t, got.Error(), "no_endpoint")
}

func TestSessionsInFlightAreListed(t *testing.T) {
	x := start(t, setup{decode: enginesim.Config{ITL: 20 * time.Millisecond}})
	req, err := http.NewRequest(http.MethodPost, x.url+"/v1/completions",
		strings.NewReader(`{"model":"tiny","prompt":"`+longPrompt+`","max_tokens":3000,"stream":true}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", "mine")
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, 200, resp.StatusCode)
	require.Eventually(t, func() bool { return len(x.flow.Sessions()) == 1 && x.flow.Sessions()[0].Phase == "stream" },
		20*time.Second, time.Millisecond)
	s := x.flow.Sessions()[0]
	require.Equal(t, "mine", s.RequestID)
	require.Equal(t, "tiny", s.Model)
	require.Equal(t, "nixl", s.Connector)
	require.Equal(t, 1, s.Attempt)
	require.Len(t, s.ID, 32)
	require.True(t, strings.HasPrefix(x.p.URL(), "http://"+s.Prefill))
	require.True(t, strings.HasPrefix(x.d.URL(), "http://"+s.Decode))
	require.Positive(t, s.Age)
	require.WithinDuration(t, time.Now().Add(30*time.Second), s.ExpiresAt, 10*time.Second)
	require.NoError(t, resp.Body.Close()) // the client leaves
	require.Eventually(t, func() bool { return len(x.flow.Sessions()) == 0 }, 20*time.Second, time.Millisecond)
}

func TestMuxLookup(t *testing.T) {
	x := start(t, setup{})
	mux := newMux(t, pdflow.WithMaxBody(10), pdflow.WithTimeouts(config.Timeouts{Body: config.None}))
	_, found := mux.Lookup("tiny")
	require.False(t, found)
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"tiny": x.flow}))
	got, found := mux.Lookup("tiny")
	require.True(t, found)
	require.Same(t, x.flow, got)
	require.Equal(t, 413, post(t, serve(t, mux), "/v1/completions", completion("a", "")).status)
	require.NoError(t, x.flow.HealthCheck(t.Context()))
}
