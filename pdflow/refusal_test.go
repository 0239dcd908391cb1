// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/sharedtest"
	"github.com/pdkit/pdkit/pdflow"
)

// refusedOnes are the requests that no flow took, as an observer sees them.
type refusedOnes struct {
	mu  sync.Mutex
	all []pdflow.Refusal
}

func (r *refusedOnes) observer() pdflow.Observer {
	return pdflow.Observer{Refused: func(_ context.Context, x *pdflow.Refusal) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.all = append(r.all, *x)
	}}
}

// Each request that is refused before a flow has it is counted, logged and shown once, and no text has what the client
// wrote.
func TestRefusedRequestsAreTold(t *testing.T) {
	const unknown = `{"model":"no","prompt":"secret"}`
	large := strings.Repeat("x", 2000)
	for name, c := range map[string]struct {
		path, contentType, body string
		status                  int
		api                     string
		model                   string
	}{
		"a path that is none":  {"/v1/nowhere", "application/json", `{}`, 404, "unknown", ""},
		"no JSON":              {"/v1/completions", "application/json", `{"prompt":"secret`, 400, "completions", ""},
		"a media type":         {"/v1/completions", "image/png", `{"prompt":"secret"}`, 415, "completions", ""},
		"too large":            {"/v1/completions", "application/json", large, 413, "completions", ""},
		"a model that is none": {"/v1/completions", "application/json", unknown, 404, "completions", "no"},
	} {
		t.Run(name, func(t *testing.T) {
			b, seen, lines := &book{}, &refusedOnes{}, &bytes.Buffer{}
			mux := newMux(t, pdflow.WithMaxBody(1000), metered(b),
				logsTo(slog.New(slog.NewTextHandler(lines, nil))), pdflow.WithObserver(seen.observer()))
			x := script(t, &fake{}, answer(ok), answer(ok))
			require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"one": x.flow, "two": x.flow}))
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, serve(t, mux)+c.path,
				strings.NewReader(c.body))
			require.NoError(t, err)
			req.Header.Set("Content-Type", c.contentType)
			req.Header.Set("X-Request-Id", "r-1")
			resp, err := http.DefaultClient.Do(req)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			require.Equal(t, c.status, resp.StatusCode)
			require.Len(t, seen.all, 1)
			r := seen.all[0]
			assert.Equal(t, c.api, r.API.String())
			assert.Equal(t, "r-1", r.RequestID)
			assert.Equal(t, c.model, r.Model)
			assert.Equal(t, c.status, r.Err.HTTPStatus())
			assert.Equal(t, []float64{1}, b.of("pd.requests.refused error.type="+string(r.Err.Code)+" pd.api="+c.api))
			assert.Equal(t, 1, strings.Count(lines.String(), "request refused"))
			assert.Contains(t, lines.String(), "request_id=r-1")
			assert.NotContains(t, lines.String(), "secret")
			assert.Empty(t, x.seen.list())
		})
	}
}

// A Mux without a meter and a logger of its own uses those of a flow: no refused request is hidden.
func TestAMuxWithoutTelemetryTellsByThatOfItsFlows(t *testing.T) {
	const key = "pd.requests.refused error.type=not_found pd.api=completions"
	mux := newMux(t)
	url := serve(t, mux)
	require.Equal(t, 503, post(t, url, "/v1/completions", completion("hi", "")).status, "no flow, nobody to tell")
	b, second, lines := &book{}, &book{}, &sharedtest.Log{}
	x := script(t, &fake{}, answer(ok), answer(ok), metered(b), logsTo(slog.New(slog.NewTextHandler(lines, nil))))
	y := script(t, &fake{}, answer(ok), answer(ok), metered(second))
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"b": y.flow, "a": x.flow}))
	require.Equal(t, 404, post(t, url, "/v1/completions", `{"model":"no","prompt":"hi"}`).status)
	assert.Len(t, b.of(key), 1)
	assert.Empty(t, second.of(key), "counted once")
	assert.Equal(t, 1, strings.Count(lines.String(), "request refused"))

	own := &book{}
	mux = newMux(t, metered(own))
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"a": x.flow}))
	require.Equal(t, 404, post(t, serve(t, mux), "/v1/completions", `{"model":"no","prompt":"hi"}`).status)
	assert.Len(t, own.of(key), 1)
	assert.Len(t, b.of(key), 1, "the Mux has its own")
	assert.Equal(t, 2, strings.Count(lines.String(), "request refused"), "but no logger")
}

// noStarter is a connector that cannot start.
type noStarter struct{ fake }

func (*noStarter) Start(context.Context) error { return errors.New("the port is taken") }

// A flow has an observer of its own for what it refuses, whichever way the request came.
func TestAFlowTellsWhatItRefuses(t *testing.T) {
	b, seen := &book{}, &refusedOnes{}
	x := script(t, &fake{}, answer(ok), answer(ok), metered(b), pdflow.WithObserver(seen.observer()))
	const key = "pd.requests.refused error.type=invalid_request pd.api=completions"
	require.Equal(t, 400, post(t, x.url, "/v1/completions", `[]`).status)
	require.Len(t, b.of(key), 1)
	_, err := x.flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(`[]`)})
	require.ErrorIs(t, err, pdflow.CodeInvalid)
	require.Len(t, b.of(key), 2)
	client := &http.Client{Transport: x.flow.RoundTripper(nil)}
	resp, err := client.Post(x.url+"/v1/completions", "application/json", strings.NewReader(`[]`))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Len(t, b.of(key), 3)
	require.Len(t, seen.all, 3)

	x = script(t, &noStarter{}, answer(ok), answer(ok), metered(b),
		pdflow.WithObserver(seen.observer()))
	require.Equal(t, 500, post(t, x.url, "/v1/completions", completion("hi", "")).status)
	require.Len(t, seen.all, 4)
	require.Equal(t, pdflow.CodeInternal, seen.all[3].Err.Code)
}

// An observer that panics costs the client nothing.
func TestARefusalSurvivesItsObserver(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(ok), pdflow.WithObserver(pdflow.Observer{
		Refused: func(context.Context, *pdflow.Refusal) { panic("mine") }}))
	require.Equal(t, 400, post(t, x.url, "/v1/completions", `[]`).status)
}
