// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"math"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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
		"WithTracerProvider":   pdflow.WithTracerProvider(nil),
		"WithMeterProvider":    pdflow.WithMeterProvider(nil),
		"WithPropagator":       pdflow.WithPropagator(nil),
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

type leasesBack struct{ fake }

func (*leasesBack) Traits() connector.Traits {
	return connector.Traits{Name: "back", Lease: -time.Second}
}

// New holds a connector to its own declaration.
func TestNewRefusesTraitsThatCannotBeKeptTo(t *testing.T) {
	_, err := pdflow.New(&leasesBack{}, pickNothing{})
	require.ErrorContains(t, err, "Traits.Lease is negative")
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
