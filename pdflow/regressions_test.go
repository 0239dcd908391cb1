// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/propagation"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Faults of earlier versions: which engine is blamed for a failure, and what the picker, observers and the client get.

func last(x *scripted) pdflow.Outcome {
	all := x.seen.list()
	return all[len(all)-1]
}

func TestTheEngineThatFailedIsTheOneThatIsBlamed(t *testing.T) {
	waitFor := func(leg string, h handler) handler {
		return func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
			for !strings.Contains(x.all(), leg) {
				time.Sleep(time.Millisecond)
			}
			h(x, w, r, b)
		}
	}
	x := script(t, &fake{order: connector.Together}, waitFor("D", status(500)), gone)
	post(t, x.url, "/v1/completions", completion("a", ""))
	require.Equal(t, last(x).Prefill.Endpoint, last(x).Err.Endpoint)
	require.Equal(t, pdflow.LegPrefill, last(x).Err.Leg)

	x = script(t, &fake{order: connector.Together}, gone, waitFor("P", status(500)))
	post(t, x.url, "/v1/completions", completion("a", ""))
	require.Equal(t, last(x).Decode.Endpoint, last(x).Err.Endpoint)
	require.Equal(t, pdflow.LegDecode, last(x).Err.Leg)

	y := start(t, setup{prefill: enginesim.Config{Lease: time.Second}})
	y.p.Inject(
		enginesim.Fault{Kind: enginesim.FaultMutateHandoff, Mutate: func(h map[string]any) { clear(h) }, Count: -1},
	)
	post(t, y.url, "/v1/completions", completion(longPrompt, ""))
	require.Equal(t, pdflow.LegPrefill, y.seen.list()[0].Err.Leg, "a missing handoff is P's fault")
}

func TestTheCallersOwnDeadlineBlamesNoEngine(t *testing.T) {
	x := script(t, &fake{}, gone, answer(ok))
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err := x.flow.Do(ctx, &pdflow.Request{API: connector.APICompletions, Body: []byte(completion("a", ""))})
	require.ErrorIs(t, err, pdflow.CodeTimeout)
	require.False(t, last(x).Err.EngineFault())
}

func TestAClientCannotFakeAnAbort(t *testing.T) {
	echo := `{"object":"response","metadata":{"finish_reason":"abort"},"output":[]}`
	x := script(t, &fake{}, answer(ok), answer(echo))
	r := post(t, x.url, "/v1/responses", `{"input":"a","metadata":{"finish_reason":"abort"}}`)
	require.NoError(t, r.err)
	require.Equal(t, 200, r.status)
	x = script(
		t, &fake{}, answer(ok), answer(`{"choices":[{"message":{"content":"{\"finish_reason\":\"abort\"}"},`+
			`"finish_reason":"stop"}]}`),
	)
	require.Equal(t, 200, post(t, x.url, "/v1/chat/completions", `{"messages":[]}`).status)
}

// The flow sees that decode aborted, however the response's bytes are split into reads: streamed or not, through
// ServeHTTP and through Do.
func TestAnAbortIsSeenWhereverReadsCutIt(t *testing.T) {
	whole := `{"choices":[{"text":"abc","finish_reason":"abort","stop_reason":null}],"usage":null}`
	stream := `data: {"choices":[{"text":"abc","finish_reason":null}]}` + "\n\n" +
		`data: {"choices":[{"text":"","finish_reason":"abort","stop_reason":null}]}` + "\n\n" +
		`data: {"choices":[],"usage":{}}` + "\n\ndata: [DONE]\n\n"
	for name, text := range map[string]string{"whole": whole, "stream": stream} {
		t.Run(name, func(t *testing.T) {
			for cut := 60; cut < len(text)-1; cut += 3 {
				gate := make(chan struct{})
				x := script(t, &fake{}, answer(ok),
					func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
						w.Header().Set("Content-Type",
							map[string]string{"whole": "application/json", "stream": "text/event-stream"}[name])
						_, _ = io.WriteString(w, text[:cut])
						_ = http.NewResponseController(w).Flush()
						select {
						case <-gate:
						case <-time.After(3 * time.Millisecond):
						}
						_, _ = io.WriteString(w, text[cut:])
					})
				r := post(t, x.url, "/v1/completions",
					completion("a", map[string]string{"whole": "", "stream": `"stream":true`}[name]))
				require.True(t, r.err != nil || r.status == 502, "cut at %d: %d %s", cut, r.status, r.body)
				require.False(t, r.status == 200 && strings.Contains(r.body, "[DONE]") && r.err == nil)

				resp, err := x.flow.Do(context.Background(),
					&pdflow.Request{API: connector.APICompletions, Body: []byte(completion("a", ""))})
				if err == nil {
					_, err = io.ReadAll(resp.Body)
					require.NoError(t, resp.Body.Close())
				}
				require.Error(t, err, "Do, cut at %d", cut)
				close(gate)
			}
		})
	}
}

func TestAnEmptyResponseIsABreak(t *testing.T) {
	for _, contentType := range []string{"application/json", "text/event-stream"} {
		x := script(t, &fake{}, answer(ok), func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
			w.Header().Set("Content-Type", contentType)
		})
		require.Equal(t, 502, post(t, x.url, "/v1/completions", completion("a", "")).status)
	}
}

func TestALargeRefusalOfPrefillKeepsItsStatus(t *testing.T) {
	x := script(t, &fake{}, func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.WriteHeader(400)
		_, _ = io.WriteString(w, `{"error":{"message":"`+strings.Repeat("x", 2<<20)+`"}}`)
	}, answer(ok), pdflow.WithRetry(config.Retry{MaxAttempts: 3}))
	r := post(t, x.url, "/v1/completions", completion("a", ""))
	require.Equal(t, 400, r.status)
	require.Equal(t, "P", x.all())
}

func TestErrorsSayHowTheRequestWasServed(t *testing.T) {
	x := script(t, &fake{}, status(500), answer(ok))
	require.Equal(t, "disaggregated", post(t, x.url, "/v1/completions", completion("a", "")).header.Get("X-PD-Mode"))
}

func TestAnAggregatedRequestTriesAnotherEngine(t *testing.T) {
	dead := serve(t, http.NotFoundHandler())
	x := start(t, setup{prefill: atOwnPorts(t, enginesim.Config{}), noEndpoints: true})
	x.p.Kill()
	_ = dead
	flow, seen := newFlow(
		t, nil, []discovery.Endpoint{endpoint(t, x.p.URL(), discovery.RoleDecode),
			endpoint(t, x.d.URL(), discovery.RoleDecode)},
	)
	url := serve(t, flow)
	for range 4 {
		require.Equal(
			t, 200, post(t, url, "/v1/completions", `{"model":"tiny","prompt":"abc","max_tokens":2,"n":2,`+
				`"temperature":0.8}`).status,
		)
	}
	require.GreaterOrEqual(t, len(seen.list()), 5)
}

// starting is a connector whose start fails once.
type starting struct {
	fake
	calls int
	alive context.Context
}

func (s *starting) Start(ctx context.Context) error {
	if s.calls++; s.calls == 1 {
		return errors.New("address in use")
	}
	s.alive = ctx
	return nil
}

func TestAConnectorIsStartedOnceAndOutlivesItsFirstClient(t *testing.T) {
	s := &starting{}
	x := script(t, s, answer(ok), answer(ok))
	require.Equal(t, 500, post(t, x.url, "/v1/completions", completion("a", "")).status)
	for range 3 {
		require.Equal(t, 200, post(t, x.url, "/v1/completions", completion("a", "")).status)
	}
	require.Equal(t, 2, s.calls)
	require.NoError(t, s.alive.Err())
}

// crashing is a connector whose CheckRequest panics.
type crashing struct{ fake }

func (*crashing) CheckRequest(*connector.ClientRequest) error { panic("boom") }

func TestAPanicEndsOneRequestOnly(t *testing.T) {
	x := script(t, &crashing{}, answer(ok), answer(ok))
	require.Equal(t, 500, post(t, x.url, "/v1/completions", completion("a", "")).status)
	require.Empty(t, x.flow.Sessions())
	x = script(t, &fake{}, answer(ok), answer(ok), pdflow.WithObserver(pdflow.Observer{
		SessionEnd: func(context.Context, *pdflow.Outcome) { panic("boom") },
	}))
	require.Equal(t, 200, post(t, x.url, "/v1/completions", completion("a", "")).status)
	require.Empty(t, x.flow.Sessions())
	_, err := x.flow.Do(context.Background(), &pdflow.Request{Body: []byte("{}")})
	require.ErrorIs(t, err, pdflow.CodeNotFound, "an API that is none")
}

// legs is an observer that counts the legs that have begun, and those that are still open.
type legs struct {
	mu   sync.Mutex
	open int
	all  int
}

func (l *legs) LegStart(context.Context, *connector.Session, pdflow.LegKind) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open++
	l.all++
}
func (l *legs) LegEnd(context.Context, *connector.Session, *pdflow.LegOutcome, *connector.PrefillResult) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
}

func TestEveryLegThatBeginsEnds(t *testing.T) {
	for name, s := range map[string]*scripted{
		"together":          script(t, &fake{order: connector.Together}, answer(ok), answer(ok)),
		"together, P fails": script(t, &fake{order: connector.Together}, status(500), answer(ok)),
		"decode first": script(t, &cold{fake{order: connector.DecodeFirst}}, answer(ok),
			answer(`{"choices":[{"finish_reason":"cache_threshold"}]}`)),
		"P's response": script(t, &finishing{}, answer(ok), answer(ok)),
	} {
		l := &legs{}
		flow, err := pdflow.New(s.flow.Connector(), pickOf(s),
			pdflow.WithObserver(pdflow.Observer{LegStart: l.LegStart, LegEnd: l.LegEnd}),
			pdflow.WithRetry(config.Retry{MaxAttempts: 1}))
		require.NoError(t, err)
		url := serve(t, flow)
		for range 40 {
			post(t, url, "/v1/completions", completion("a", ""))
		}
		require.NoError(t, flow.Shutdown(context.Background()))
		require.Zero(t, l.open, name)
		require.Positive(t, l.all, name)
	}
}

// pickOf returns a picker that always picks the two engines of s.
func pickOf(s *scripted) pdflow.Picker { return always(s.pair) }

// always returns a picker that always returns the same pick.
func always(p pdflow.Pick) pdflow.Picker {
	return pick.Func(func(context.Context, *pdflow.PickInput) (pdflow.Pick, error) { return p, nil })
}

// around is a picker that asks another one by a function.
type around struct {
	pdflow.Picker
	pick func(ctx context.Context, inner pdflow.Picker, in *pdflow.PickInput) (pdflow.Pick, error)
}

func (a around) Pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	return a.pick(ctx, a.Picker, in)
}

func (a around) Bind(c connector.KVConnector, serving connector.Serving) pdflow.Picker {
	return around{a.Picker.Bind(c, serving), a.pick}
}

func TestTheTraceOfTheClientGoesThroughWithoutATracer(t *testing.T) {
	x := start(t, setup{opts: []pdflow.Option{
		pdflow.WithTelemetry(pdflow.Telemetry{Propagator: propagation.TraceContext{}})}})
	post(t, x.url, "/v1/completions", completion(longPrompt, ""), "traceparent",
		"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	require.Equal(t, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		x.d.Requests()[0].Header.Get("traceparent"))
}
