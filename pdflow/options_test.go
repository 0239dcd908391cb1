// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
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
			func(string, int) func(*http.Request) (*http.Response, error) { return replies(http.StatusBadGateway) })
		begun := time.Now()
		for range 100 {
			require.Error(t, f.do(`{"prompt":"hi"}`))
		}
		assert.InDelta(t, 75*time.Millisecond, time.Since(begun)/100, float64(20*time.Millisecond),
			"half of 50 ms and half of 100 ms, in the mean")
	})
}

func TestOptionsWithoutTheirValueAreRefused(t *testing.T) {
	for name, o := range map[string]pdflow.Option{
		"nil option":           nil,
		"WithLogger":           pdflow.WithLogger(nil),
		"WithErrorHandler":     pdflow.WithErrorHandler(nil),
		"WithTransport":        pdflow.WithTransport(nil),
		"WithFallbackFlow":     pdflow.WithFallbackFlow(nil),
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

// A Mux heeds an option or refuses it.
func TestAMuxHeedsItsOptionsAndRefusesAFlows(t *testing.T) {
	other, err := pdflow.New(newNIXL(t), pick.New(setOf(t), pick.RoundRobin()))
	require.NoError(t, err)
	for name, c := range map[string]struct {
		option pdflow.Option
		flows  bool
	}{
		"WithMaxBody":         {pdflow.WithMaxBody(10), false},
		"WithBudget":          {pdflow.WithBudget(pdflow.NewBudget(10)), false},
		"WithErrorHandler":    {pdflow.WithErrorHandler(pdflow.WriteError), false},
		"WithRequestID":       {pdflow.WithRequestID(func(*http.Request) string { return "" }), false},
		"WithLogger":          {pdflow.WithLogger(slog.New(slog.DiscardHandler)), false},
		"WithObserver":        {pdflow.WithObserver(pdflow.Observer{}), false},
		"Body and Write":      {pdflow.WithTimeouts(config.Timeouts{Body: 1, Write: 1}), false},
		"metrics":             {pdflow.WithTelemetry(pdflow.Telemetry{MeterProvider: noop.NewMeterProvider()}), false},
		"WithTransport":       {pdflow.WithTransport(http.DefaultTransport), true},
		"other timeouts":      {pdflow.WithTimeouts(config.Timeouts{Prefill: 1}), true},
		"WithRetry":           {pdflow.WithRetry(config.Retry{MaxAttempts: 1}), true},
		"WithFallback":        {pdflow.WithFallback(config.FallbackDecode), true},
		"WithFallbackFlow":    {pdflow.WithFallbackFlow(other), true},
		"WithRequestCheckers": {pdflow.WithRequestCheckers(checks{}), true},
		"WithUnsupported":     {pdflow.WithUnsupported(config.UnsupportedRefuse), true},
		"WithStepsLimit":      {pdflow.WithStepsLimit(time.Second), true},
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

// What a flow has of its own holds for its requests behind a Mux, too.
func TestAMuxKeepsToWhatItsFlowsHaveOfTheirOwn(t *testing.T) {
	own := func(r *http.Request) string { return "own-" + r.Header.Get("X-Tenant") }
	said := func(w http.ResponseWriter, _ *http.Request, e *pdflow.Error) {
		w.WriteHeader(e.HTTPStatus())
		_, _ = io.WriteString(w, "the flow says "+string(e.Code))
	}
	budget := pdflow.NewBudget(2000)
	x := script(t, &fake{}, answer(ok), answer(ok), pdflow.WithMaxBody(3000), pdflow.WithRequestID(own),
		pdflow.WithErrorHandler(said), pdflow.WithBudget(budget))
	mux := newMux(t)
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"a": x.flow}))
	url := serve(t, mux)
	body := func(n int) string {
		const empty = `{"model":"a","prompt":""}`
		return `{"model":"a","prompt":"` + strings.Repeat("x", n-len(empty)) + `"}`
	}
	r := post(t, url, "/v1/completions", body(80), "X-Tenant", "t")
	assert.Equal(t, 200, r.status)
	assert.Equal(t, "own-t", r.header.Get("X-Request-Id"))
	require.Eventually(t, func() bool { return budget.InUse() == 0 }, 20*time.Second, time.Millisecond)
	r = post(t, url, "/v1/completions", body(2500), "X-Tenant", "t")
	assert.Equal(t, "503 the flow says overloaded", fmt.Sprint(r.status, " ", r.body))
	r = post(t, url, "/v1/completions", body(3001), "X-Tenant", "t")
	assert.Equal(t, "413 the flow says body_too_large", fmt.Sprint(r.status, " ", r.body))
	assert.Equal(t, "own-t", r.header.Get("X-Request-Id"))
	assert.Zero(t, budget.InUse())

	small := newMux(t, pdflow.WithMaxBody(2999))
	require.ErrorContains(t, small.SetRoutes(map[string]pdflow.Server{"a": x.flow}), "give NewMux the larger")
	split, err := pdflow.NewSplit(x.flow, x.flow, 50)
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
	_, err := pdflow.New(&leasesBack{}, pickNothing{})
	require.ErrorContains(t, err, "Traits.Handoff.Lease is negative")
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
	assert.Equal(t, pdflow.CodeInvalid, pdflow.CodeOf(err), "no request at all")
}
