// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func newNIXL(t *testing.T) connector.KVConnector {
	t.Helper()
	c, err := nixl.New(nil)
	require.NoError(t, err)
	return c
}

// A guard that an option does not name stays as it is: setting one limit never turns another off.
func TestPartlySetOptionsKeepTheOtherDefaults(t *testing.T) {
	for name, c := range map[string]struct {
		opts []pdflow.Option
		want time.Duration
	}{
		"no option": {nil, 25 * time.Second},
		"another timeout": {[]pdflow.Option{pdflow.WithTimeouts(config.Timeouts{Prefill: 5 * time.Second})},
			25 * time.Second},
		"a limit": {[]pdflow.Option{pdflow.WithTimeouts(config.Timeouts{Handoff: time.Second})},
			time.Second},
		"none": {[]pdflow.Option{pdflow.WithTimeouts(config.Timeouts{Handoff: config.None})}, 0},
		"two that leave each other's alone": {[]pdflow.Option{
			pdflow.WithTimeouts(config.Timeouts{Handoff: time.Second}),
			pdflow.WithTimeouts(config.Timeouts{Prefill: 5 * time.Second})}, time.Second},
		"two of the same": {[]pdflow.Option{pdflow.WithTimeouts(config.Timeouts{Handoff: time.Second}),
			pdflow.WithTimeouts(config.Timeouts{Handoff: 2 * time.Second})}, 2 * time.Second},
	} {
		flow, err := pdflow.New(newNIXL(t), pick.New(setOf(t), pick.RoundRobin()), c.opts...)
		require.NoError(t, err, name)
		assert.Equal(t, c.want, flow.HandoffLimit(), name)
	}
}

// A retry policy that names only the number of attempts still pauses between them.
func TestRetriesPauseByDefault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &fake{}, "p0 d0", config.Retry{MaxAttempts: 3},
			func(string, int) response { return replies(http.StatusBadGateway) })
		begun := time.Now()
		for range 100 {
			require.Error(t, f.do(`{"prompt":"hi"}`))
		}
		assert.InDelta(t, 75*time.Millisecond, time.Since(begun)/100, float64(20*time.Millisecond),
			"half of 50 ms and half of 100 ms, in the mean")
	})
}

func TestOptionsWithoutTheirValueAreRefused(t *testing.T) {
	flow, err := pdflow.New(newNIXL(t), pick.New(setOf(t), pick.RoundRobin()))
	require.NoError(t, err)
	for name, o := range map[string]pdflow.Option{
		"nil option":           nil,
		"WithErrorHandler":     pdflow.WithErrorHandler(nil),
		"WithTransport":        pdflow.WithTransport(nil),
		"fallback to no flow":  pdflow.WithFallback(config.FallbackConnector, nil),
		"fallback with a flow": pdflow.WithFallback(config.FallbackDecode, flow),
		"WithBudget":           pdflow.WithBudget(&pdflow.Budget{}),
		"WithMaxBody":          pdflow.WithMaxBody(0),
		"negative timeout":     pdflow.WithTimeouts(config.Timeouts{Idle: -time.Second}),
		"negative attempts":    pdflow.WithRetry(config.Retry{MaxAttempts: -1}),
		"negative backoff":     pdflow.WithRetry(config.Retry{BackoffBase: -time.Second}),
		"negative budget":      pdflow.WithRetry(config.Retry{Budget: -0.1}),
		"negative hedge":       pdflow.WithRetry(config.Retry{Hedge: -time.Second}),
		"budget not a number":  pdflow.WithRetry(config.Retry{Budget: math.NaN()}),
		"unknown fallback":     pdflow.WithFallback("decod"),
		"fallback by its name": pdflow.WithFallback(config.FallbackConnector),
		"unknown policy":       pdflow.WithUnsupported("no"),
	} {
		flow, err := pdflow.New(newNIXL(t), pick.New(setOf(t), pick.RoundRobin()), o)
		require.Error(t, err, name)
		assert.Nil(t, flow, name)
	}
}

// ignores writes no error.
func ignores(http.ResponseWriter, *http.Request, *pdflow.Error) {}

// A Mux heeds an option or refuses it.
func TestAMuxHeedsItsOptionsAndRefusesAFlows(t *testing.T) {
	other, err := pdflow.New(newNIXL(t), pick.New(setOf(t), pick.RoundRobin()))
	require.NoError(t, err)
	for name, c := range map[string]struct {
		option pdflow.Option
		flows  bool
	}{
		"WithMaxBody":         {pdflow.WithMaxBody(10), false},
		"WithBudget":          {pdflow.WithBudget(&pdflow.Budget{Bytes: 10}), false},
		"WithErrorHandler":    {pdflow.WithErrorHandler(ignores), false},
		"WithRequestID":       {pdflow.WithRequestID(func(*http.Request) string { return "" }), false},
		"a logger":            {logsTo(slog.New(slog.DiscardHandler)), false},
		"WithObserver":        {pdflow.WithObserver(pdflow.Observer{}), false},
		"Body and Write":      {pdflow.WithTimeouts(config.Timeouts{Body: 1, Write: 1}), false},
		"metrics":             {metered(noop.NewMeterProvider()), false},
		"WithTransport":       {pdflow.WithTransport(http.DefaultTransport), true},
		"other timeouts":      {pdflow.WithTimeouts(config.Timeouts{Prefill: 1}), true},
		"the limit of steps":  {pdflow.WithTimeouts(config.Timeouts{Steps: 1}), true},
		"WithRetry":           {pdflow.WithRetry(config.Retry{MaxAttempts: 1}), true},
		"WithFallback":        {pdflow.WithFallback(config.FallbackDecode), true},
		"fallback to a flow":  {pdflow.WithFallback(config.FallbackConnector, other), true},
		"WithRequestCheckers": {pdflow.WithRequestCheckers(checks{}), true},
		"WithUnsupported":     {pdflow.WithUnsupported(config.UnsupportedRefuse), true},
		"WithRescue":          {pdflow.WithRescue(1), true},
		"WithForwardHeaders":  {pdflow.WithForwardHeaders("X-Tenant"), true},
		"spans' names": {pdflow.WithTelemetry(pdflow.Telemetry{
			SpanName: func(_, operation string) string { return operation }}), true},
		"usage": {pdflow.WithTelemetry(pdflow.Telemetry{Usage: true}), true},
	} {
		m, err := pdflow.NewMux(c.option)
		if !c.flows {
			require.NoError(t, err, name)
			continue
		}
		require.ErrorContains(t, err, "is for flows: give it to New", name)
		assert.Nil(t, m, name)
	}
	_, err = pdflow.NewMux(nil)
	require.ErrorContains(t, err, "nil")
}

// An option of the client's side holds for a flow's requests at the flow, at its Mux, and at a flow behind a Mux.
func TestAnOptionOfTheClientsSideHoldsWhereverItIsGiven(t *testing.T) {
	t.Parallel()
	body := func(n int) string {
		const empty = `{"model":"a","prompt":""}`
		return `{"model":"a","prompt":"` + strings.Repeat("x", n-len(empty)) + `"}`
	}
	status := func(size int) func(*testing.T, *scripted, string) string {
		return func(t *testing.T, _ *scripted, url string) string {
			r := post(t, url, "/v1/completions", body(size))
			_, code := r.fault(t)
			return fmt.Sprint(r.status, " ", code)
		}
	}
	for name, c := range map[string]struct {
		option  pdflow.Option
		observe func(*testing.T, *scripted, string) string
		want    string
		refused string // by SetRoutes, for a flow behind a Mux
	}{
		"WithMaxBody": {option: pdflow.WithMaxBody(100), observe: status(101), want: "413 body_too_large"},
		"WithBudget": {option: pdflow.WithBudget(&pdflow.Budget{Bytes: 2000}), observe: status(2500),
			want: "503 overloaded"},
		"WithErrorHandler": {
			option: pdflow.WithErrorHandler(func(w http.ResponseWriter, _ *http.Request, e *pdflow.Error) {
				w.WriteHeader(http.StatusTeapot)
				_, _ = io.WriteString(w, string(e.Code))
			}),
			observe: func(t *testing.T, _ *scripted, url string) string {
				r := post(t, url, "/v1/completions", `{"model":"a","prompt":"no"}`)
				return fmt.Sprint(r.status, " ", r.body)
			},
			want: "418 prefill_rejected",
		},
		"WithRequestID": {
			option: pdflow.WithRequestID(func(r *http.Request) string { return "own-" + r.Header.Get("X-Tenant") }),
			observe: func(t *testing.T, x *scripted, url string) string {
				r := post(t, url, "/v1/completions", body(80), "X-Tenant", "t")
				return fmt.Sprint(r.status, " ", r.header.Get("X-Request-Id"))
			},
			want: "200 own-t",
		},
		"WithTimeouts, Body": {
			option: pdflow.WithTimeouts(config.Timeouts{Body: 100 * time.Millisecond}),
			observe: func(t *testing.T, _ *scripted, url string) string {
				conn := dial(t, url, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"+
					"Content-Length: 1000\r\n\r\n{")
				resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
				require.NoError(t, err)
				return resp.Status
			},
			want:    "408 Request Timeout",
			refused: "another limit of Body than the Mux",
		},
		"WithTimeouts, Write": {
			option: pdflow.WithTimeouts(config.Timeouts{Write: 50 * time.Millisecond}),
			observe: func(t *testing.T, x *scripted, url string) string {
				dial(t, url, raw("/v1/completions", `{"model":"a","prompt":"p","stream":true}`)) // and reads nothing
				require.Eventually(t, func() bool { return strings.Contains(x.all(), "freed") }, 10*time.Second,
					5*time.Millisecond, "the decode engine still works for a client that reads nothing")
				return "freed"
			},
			want: "freed",
		},
	} {
		prefill := func(_ *scripted, w http.ResponseWriter, _ *http.Request, body string) {
			if strings.Contains(body, `"no"`) {
				http.Error(w, "no", http.StatusBadRequest)
				return
			}
			_, _ = io.WriteString(w, ok)
		}
		decode := func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
			if strings.Contains(body, `"stream":true`) {
				endless(x, w, r, body)
				return
			}
			answer(ok)(x, w, r, body)
		}
		for place, at := range map[string]struct{ flow, mux bool }{
			"a flow": {flow: true}, "a Mux": {mux: true}, "a flow in a Mux": {flow: true, mux: true},
		} {
			t.Run(name+" at "+place, func(t *testing.T) {
				var flows, muxes []pdflow.Option
				if at.flow {
					flows = append(flows, c.option)
				} else {
					muxes = append(muxes, c.option)
				}
				x := script(t, &fake{}, prefill, decode, flows...)
				url := x.url
				if at.mux {
					mux := newMux(t, muxes...)
					err := mux.SetRoutes(map[string]pdflow.Server{"a": x.flow})
					if at.flow && c.refused != "" {
						require.ErrorContains(t, err, c.refused)
						return
					}
					require.NoError(t, err)
					url = serve(t, mux)
				}
				assert.Equal(t, c.want, c.observe(t, x, url))
			})
		}
	}
}

// What a flow has of its own comes before what its Mux has, and is given back.
func TestAFlowsOwnOptionsComeBeforeThoseOfItsMux(t *testing.T) {
	own := func(id string) pdflow.Option {
		return pdflow.WithRequestID(func(*http.Request) string { return id })
	}
	says := func(who string) pdflow.Option {
		return pdflow.WithErrorHandler(func(w http.ResponseWriter, _ *http.Request, e *pdflow.Error) {
			w.WriteHeader(e.HTTPStatus())
			_, _ = io.WriteString(w, who+": "+string(e.Code))
		})
	}
	budget, shared := &pdflow.Budget{Bytes: 4000}, &pdflow.Budget{Bytes: 9000}
	x := script(t, &fake{}, answer(ok), answer(ok), pdflow.WithMaxBody(3000), own("flow"), says("flow"),
		pdflow.WithBudget(budget))
	mux := newMux(t, own("mux"), says("mux"), pdflow.WithBudget(shared))
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"a": x.flow, "b": x.flow}))
	url := serve(t, mux)
	r := post(t, url, "/v1/completions", `{"model":"a","prompt":"`+strings.Repeat("x", 3000)+`"}`)
	assert.Equal(t, "413 flow: body_too_large", fmt.Sprint(r.status, " ", r.body))
	assert.Equal(t, "flow", r.header.Get("X-Request-Id"))
	r = post(t, url, "/v1/completions", `{"model":"none","prompt":""}`)
	assert.Equal(t, "404 mux: not_found", fmt.Sprint(r.status, " ", r.body), "no flow has this request")
	assert.Equal(t, "mux", r.header.Get("X-Request-Id"))
	r = post(t, url, "/v1/completions", `{"model":"a","prompt":"`+strings.Repeat("x", 2000)+`"}`)
	assert.Equal(t, 200, r.status)
	require.Eventually(t, func() bool { return budget.InUse() == 0 && shared.InUse() == 0 }, 20*time.Second,
		time.Millisecond)

	small := newMux(t, pdflow.WithMaxBody(2999))
	require.ErrorContains(t, small.SetRoutes(map[string]pdflow.Server{"a": x.flow}), "give NewMux the larger")
	split, err := x.flow.Split(x.flow, 50)
	require.NoError(t, err)
	require.Error(t, small.SetRoutes(map[string]pdflow.Server{"a": split}))
}

// checks refuses nothing.
type checks struct{}

func (checks) CheckRequest(*connector.ClientRequest) error { return nil }

type leasesBack struct{ fake }

func (*leasesBack) Traits() connector.Traits {
	return connector.Traits{Name: "back", Handoff: connector.Handoff{Lease: -time.Second}}
}

// New holds a connector to its own declaration.
func TestNewRefusesTraitsThatCannotBeKeptTo(t *testing.T) {
	_, err := pdflow.New(&leasesBack{}, pickNothing)
	require.ErrorContains(t, err, "Traits.Handoff.Lease is negative")
}

// bindsToNothing forgets to return a picker.
type bindsToNothing struct{ pdflow.Picker }

func (bindsToNothing) Bind(connector.KVConnector, connector.Serving) pdflow.Picker { return nil }

func TestNewRefusesAPickerThatBindsToNothing(t *testing.T) {
	_, err := pdflow.New(newNIXL(t), bindsToNothing{pickNothing})
	require.ErrorContains(t, err, "bindsToNothing.Bind returned nil")
}

// A pair without engines is the caller's mistake and is told as one.
func TestDoRefusesAnEmptyPick(t *testing.T) {
	flow, err := pdflow.New(newNIXL(t), pick.New(setOf(t), pick.RoundRobin()))
	require.NoError(t, err)
	p, err := discovery.New("http://127.0.0.1:1", discovery.RolePrefill)
	require.NoError(t, err)
	for name, given := range map[string]*pdflow.Pick{"empty": {}, "without decode": {Prefill: p}} {
		_, err = flow.Do(
			context.Background(), &pdflow.Request{API: connector.APIChat, Body: []byte(`{"model":"m"}`), Pick: given},
		)
		var e *pdflow.Error
		require.ErrorAs(t, err, &e, name)
		assert.Equal(t, pdflow.CodeInvalid, e.Code, name)
		assert.Equal(t, "Pick", e.Param, name)
	}
	_, err = flow.Do(context.Background(), nil)
	assert.ErrorIs(t, err, pdflow.CodeInvalid, "no request at all")
}

// A model's own route goes before an adapter of its name, an adapter before the route for any model, and of two flows
// that serve it the first.
func TestAMuxRoutesAdapters(t *testing.T) {
	serves := func(names ...string) pdflow.Option {
		return pdflow.WithAdapters(func(model string) bool { return slices.Contains(names, model) })
	}
	flow := func(opts ...pdflow.Option) *pdflow.Flow {
		f, _ := newFlow(t, nil, nil, opts...)
		return f
	}
	a, b := flow(serves("a-lora", "both", "c")), flow(serves("b-lora", "both"))
	c, rest := flow(), flow(serves("rest-lora"))
	split, err := c.Split(flow(serves("c-lora")), 50)
	require.NoError(t, err)
	m, err := pdflow.NewMux()
	require.NoError(t, err)
	require.NoError(t, m.SetRoutes(map[string]pdflow.Server{"b": b, "a": a, "c": split, "*": rest}))
	for model, want := range map[string]pdflow.Server{"a-lora": a, "b-lora": b, "both": a, "c": split, "c-lora": split,
		"rest-lora": rest, "none": rest, "": rest} {
		got, ok := m.Lookup(model)
		require.True(t, ok)
		require.Same(t, want, got, model)
	}
	require.NoError(t, m.SetRoutes(map[string]pdflow.Server{"b": b, "a": a}))
	_, ok := m.Lookup("c-lora")
	require.False(t, ok)
}
