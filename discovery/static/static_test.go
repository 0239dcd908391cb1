// SPDX-License-Identifier: Apache-2.0

package static_test

import (
	"context"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/discovery/static"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func endpoint(t testing.TB, raw string, role discovery.Role) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New(raw, role)
	require.NoError(t, err)
	return e
}

func TestRulesOfSources(t *testing.T) {
	discoverytest.Run(t, discoverytest.Harness{New: func() discovery.Source {
		s, err := static.New(endpoint(t, "http://p:1", discovery.RolePrefill),
			endpoint(t, "http://d:1", discovery.RoleDecode))
		require.NoError(t, err)
		return s
	}})
}

func TestTheListIsKeptAsGiven(t *testing.T) {
	p, d := endpoint(t, "http://p:1", discovery.RolePrefill), endpoint(t, "http://d:1/base", discovery.RoleDecode)
	p.ID, p.Zone, p.Attributes = "prefill-0", "z1", map[string]string{"bootstrapPort": "8998"}
	d.ID, d.Phase = "", discovery.PhaseDraining
	set, err := static.NewSet(p, d)
	require.NoError(t, err)

	p.Attributes["bootstrapPort"], p.URL.Host = "1", "altered:1" // the caller's own from here on
	got := set.Load().Endpoints
	require.Len(t, got, 2)
	assert.Equal(t, "prefill-0", got[0].ID)
	assert.Equal(t, "http://p:1", got[0].URL.String())
	assert.Equal(t, "8998", got[0].Attribute("bootstrapPort"))
	assert.Equal(t, "d:1/base", got[1].ID, "an endpoint without an ID is called by its address")
	assert.Equal(t, discovery.PhaseDraining, got[1].Phase)
}

func TestAnEmptyListIsAList(t *testing.T) {
	set, err := static.NewSet()
	require.NoError(t, err)
	assert.Empty(t, set.Load().Endpoints)
	assert.EqualValues(t, 1, set.Load().Version, "it is known that there are none")
}

// A program that runs all its sets may run this one, too.
func TestASetOfAListMayBeRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set, err := static.NewSet(endpoint(t, "http://d:1", discovery.RoleDecode))
		require.NoError(t, err)
		set.OnError(func(err error) { t.Error(err) })
		set.SetHealthy("d:1", false)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		require.NoError(t, set.Run(ctx))
		assert.EqualValues(t, 2, set.Load().Version, "the same list changes nothing")
		assert.Equal(t, discovery.PhaseNotReady, set.Load().Endpoints[0].Phase)
	})
}

func TestWhatNewRefuses(t *testing.T) {
	good := func(change func(e *discovery.Endpoint)) discovery.Endpoint {
		e := endpoint(t, "http://d:1", discovery.RoleDecode)
		change(&e)
		return e
	}
	for name, c := range map[string]struct {
		second discovery.Endpoint
		want   string
	}{
		"an ID twice": {good(func(e *discovery.Endpoint) { e.ID = "p:1" }),
			`endpoint 1: ID "p:1" is endpoint 0's already (one engine for prefill and decode has the role both)`},
		"no URL": {good(func(e *discovery.Endpoint) { e.URL = nil }),
			`endpoint 1: endpoint "d:1" has no URL`},
		"no URL and no ID": {discovery.Endpoint{Role: discovery.RoleDecode}, `endpoint 1: endpoint without an ID`},
		"no role": {good(func(e *discovery.Endpoint) { e.Role = 0 }),
			`endpoint 1: endpoint "d:1": role(0) is not one of prefill, decode, both, encode`},
		"an unknown role": {good(func(e *discovery.Endpoint) { e.Role = 64 }),
			`endpoint 1: endpoint "d:1": role(64) is not one of prefill, decode, both, encode`},
		"an unknown phase": {good(func(e *discovery.Endpoint) { e.Phase = 9 }),
			`endpoint 1: endpoint "d:1": phase(9) is not one of ready, not-ready, draining`},
		"another scheme": {good(func(e *discovery.Endpoint) { e.URL = &url.URL{Scheme: "ftp", Host: "d:1"} }),
			`scheme "ftp"`},
		"no host": {good(func(e *discovery.Endpoint) { e.URL = &url.URL{Scheme: "http"} }), `no host`},
		"user info": {good(func(e *discovery.Endpoint) {
			e.URL = &url.URL{Scheme: "http", Host: "d:1", User: url.UserPassword("u", "secret")}
		}), `user info is not allowed`},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := static.NewSet(endpoint(t, "http://p:1", discovery.RolePrefill), c.second)
			require.Error(t, err)
			assert.Contains(t, err.Error(), c.want)
			assert.NotContains(t, err.Error(), "secret")
		})
	}
}
