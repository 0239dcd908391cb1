// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// checked is a connector whose listener or store fails on demand.
type checked struct {
	connector.KVConnector
	traits func(*connector.Traits)
	health func(ctx context.Context) error
}

func (c *checked) Traits() connector.Traits {
	t := c.KVConnector.Traits()
	if c.traits != nil {
		c.traits(&t)
	}
	return t
}

func (c *checked) HealthCheck(ctx context.Context) error {
	if c.health == nil {
		return nil
	}
	return c.health(ctx)
}

func newChecked(t *testing.T) *checked {
	t.Helper()
	c, err := plainhttp.New(nil)
	require.NoError(t, err)
	return &checked{KVConnector: c}
}

// staged adds an encode stage.
type staged struct{ connector.KVConnector }

func (staged) Items(*connector.Session) []connector.Item                       { return nil }
func (staged) Encode(*connector.Session, connector.Item, *connector.Leg) error { return nil }
func (staged) Merge(*connector.Session, []json.RawMessage) error               { return nil }
func (s staged) Unwrap() connector.KVConnector                                 { return s.KVConnector }

// Whose readiness probe asks such a flow must read somewhere that it always says yes.
func TestAPickerThatCannotTellWhoIsThereIsLogged(t *testing.T) {
	function := pick.Func(func(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
		return pdflow.Pick{}, pdflow.CodeNoEndpoint
	})
	for want, picker := range map[bool]pdflow.Picker{true: function, false: pick.New(setOf(t), pick.Score(nil))} {
		var log bytes.Buffer
		flow, err := pdflow.New(newChecked(t), picker, logsTo(slog.New(slog.NewTextHandler(&log, nil))))
		require.NoError(t, err)
		assert.Equal(t, want, flow.Ready(t.Context()) == nil)
		assert.Equal(t, want, strings.Contains(log.String(), "the flow counts as ready"))
		require.NoError(t, flow.Shutdown(t.Context()))
	}
}

func TestReadyFollowsTheConnectorsRules(t *testing.T) {
	p, d := endpoint(t, "http://p:1", discovery.RolePrefill), endpoint(t, "http://d:1", discovery.RoleDecode)
	other := endpoint(t, "http://d:2", discovery.RoleDecode)
	other.Group = "other"
	both, encode := endpoint(t, "http://b:1", discovery.RoleBoth), endpoint(t, "http://e:1", discovery.RoleEncode)
	pairOnly := func(t *connector.Traits) { t.Serving.PairOnly = true }
	const apart = "no prefill and decode engines of one group are ready"
	for name, c := range map[string]struct {
		traits func(*connector.Traits)
		encode bool
		eps    []discovery.Endpoint
		reason string
	}{
		"a pair":                             {nil, false, []discovery.Endpoint{p, d}, ""},
		"no prefill engine":                  {nil, false, []discovery.Endpoint{d}, "no prefill engine is ready"},
		"no decode engine":                   {nil, false, []discovery.Endpoint{p}, "no decode engine is ready"},
		"no pair":                            {nil, false, []discovery.Endpoint{p, other}, apart},
		"one engine for all":                 {nil, false, []discovery.Endpoint{both}, ""},
		"one engine for all, without a pair": {pairOnly, false, []discovery.Endpoint{both, d}, ""},
		"a decode engine, never alone": {pairOnly, false, []discovery.Endpoint{d},
			"no prefill engine is ready"},
		"an encode stage without its engine":   {nil, true, []discovery.Endpoint{p, d}, "no encode engine is ready"},
		"an encode stage":                      {nil, true, []discovery.Endpoint{p, d, encode}, ""},
		"an encode engine and nothing besides": {nil, true, []discovery.Endpoint{encode}, "no engine is ready"},
	} {
		t.Run(name, func(t *testing.T) {
			conn := newChecked(t)
			conn.traits = c.traits
			var use connector.KVConnector = conn
			if c.encode {
				use = staged{conn}
			}
			flow, _ := newFlow(t, use, c.eps)
			err := flow.Ready(t.Context())
			if c.reason == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
			var e *pdflow.Error
			require.ErrorAs(t, err, &e)
			assert.Equal(t, c.reason, e.Message)
		})
	}
}

func TestReadyAsksTheConnector(t *testing.T) {
	p, d := endpoint(t, "http://p:1", discovery.RolePrefill), endpoint(t, "http://d:1", discovery.RoleDecode)
	var lost atomic.Bool
	gone := errors.New("the store is gone")
	conn := newChecked(t)
	conn.health = func(context.Context) error {
		if lost.Load() {
			return gone
		}
		return nil
	}
	flow, _ := newFlow(t, staged{conn}, []discovery.Endpoint{p, d, endpoint(t, "http://e:1", discovery.RoleEncode)})
	require.NoError(t, flow.Ready(t.Context()))
	lost.Store(true)
	err := flow.Ready(t.Context())
	require.ErrorIs(t, err, gone, "through a connector that wraps another")
	assert.Equal(t, "connector http: the store is gone", err.Error())
	lost.Store(false)
	require.NoError(t, flow.Ready(t.Context()))
}

func TestAHealthCheckHasATimeLimit(t *testing.T) {
	for _, limit := range []time.Duration{0, time.Second, config.None} {
		synctest.Test(t, func(t *testing.T) {
			conn := newChecked(t)
			conn.health = func(ctx context.Context) error {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(time.Minute):
					return nil
				}
			}
			flow, err := pdflow.New(conn, quietPicker, pdflow.WithTimeouts(config.Timeouts{HealthCheck: limit}))
			require.NoError(t, err)
			begun := time.Now()
			err = flow.Ready(t.Context())
			switch limit {
			case config.None:
				require.NoError(t, err, "and a picker that says nothing of its readiness is not asked")
				assert.Equal(t, time.Minute, time.Since(begun))
			case 0:
				limit = 2 * time.Second
				fallthrough
			default:
				require.ErrorIs(t, err, context.DeadlineExceeded)
				assert.Equal(t, limit, time.Since(begun))
			}
			require.NoError(t, flow.Shutdown(t.Context()))
		})
	}
}

// quietPicker says nothing of its readiness.
var quietPicker = pick.Func(func(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
	panic("nobody asked for a pair")
})

func TestAFlowThatShutsDownIsNotReady(t *testing.T) {
	p, d := endpoint(t, "http://p:1", discovery.RolePrefill), endpoint(t, "http://d:1", discovery.RoleDecode)
	flow, _ := newFlow(t, nil, []discovery.Endpoint{p, d})
	require.NoError(t, flow.Ready(t.Context()))
	require.NoError(t, flow.Shutdown(t.Context()))
	require.ErrorIs(t, flow.Ready(t.Context()), pdflow.CodeDraining)
}

func TestReadinessOfSplitsAndMuxes(t *testing.T) {
	p, d := endpoint(t, "http://p:1", discovery.RolePrefill), endpoint(t, "http://d:1", discovery.RoleDecode)
	good, _ := newFlow(t, nil, []discovery.Endpoint{p, d})
	poor, _ := newFlow(t, nil, []discovery.Endpoint{d})
	for _, c := range []struct {
		main, other *pdflow.Flow
		percent     int
		ready       bool
	}{
		{good, poor, 0, true}, {good, poor, 1, false}, {good, poor, 100, false},
		{poor, good, 0, false}, {poor, good, 99, false}, {poor, good, 100, true},
		{good, good, 50, true},
	} {
		split, err := c.main.Split(c.other, c.percent)
		require.NoError(t, err)
		assert.Equal(t, c.ready, split.Ready(t.Context()) == nil, "%d percent", c.percent)
	}
	mux := newMux(t)
	require.NoError(t, mux.SetRoutes(nil))
	require.NoError(t, mux.Ready(t.Context()), "nothing is served that could not be")
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"b": good, "a": poor, "": poor}))
	err := mux.Ready(t.Context())
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
	assert.Regexp(t, `^model "": .*no prefill engine is ready\nmodel "a": .*no prefill engine is ready$`, err.Error())
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"b": good}))
	require.NoError(t, mux.Ready(t.Context()))
}

// A flow binds its picker once, and asks what Bind has returned and nothing else.
func TestAFlowAsksThePickerThatIsBoundToItsConnector(t *testing.T) {
	conn := &fake{more: func(t *connector.Traits) { t.Serving.PairOnly = true }}
	picker := &binding{}
	flow, err := pdflow.New(conn, picker)
	require.NoError(t, err)
	require.NoError(t, flow.Ready(t.Context()))
	for range 2 {
		_, err = flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`)})
		require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
	}
	assert.Equal(t, []string{"Bind"}, picker.calls)
	require.Len(t, picker.bound, 1)
	bound := picker.bound[0]
	assert.Same(t, conn, bound.conn)
	assert.Equal(t, connector.Serving{PairOnly: true}, bound.serving)
	assert.Equal(t, []string{"Changed", "Ready", "Pick", "Changed", "Pick", "Changed"}, bound.calls)
	require.NoError(t, flow.Shutdown(t.Context()))
}

// binding notes the calls that it gets, and what it was bound to.
type binding struct {
	conn    connector.KVConnector
	serving connector.Serving
	calls   []string
	bound   []*binding
}

func (b *binding) Pick(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
	b.calls = append(b.calls, "Pick")
	return pdflow.Pick{}, pdflow.CodeNoEndpoint
}

func (b *binding) Changed() <-chan struct{} {
	b.calls = append(b.calls, "Changed")
	return nil
}

func (b *binding) Ready(*pdflow.PickInput) error {
	b.calls = append(b.calls, "Ready")
	return nil
}

func (b *binding) Bind(c connector.KVConnector, serving connector.Serving) pdflow.Picker {
	b.calls = append(b.calls, "Bind")
	bound := &binding{conn: c, serving: serving}
	b.bound = append(b.bound, bound)
	return bound
}
