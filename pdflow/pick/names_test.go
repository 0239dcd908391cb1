// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/admit"
	"github.com/pdkit/pdkit/pdflow/attest"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Each picker knows the engines of its set by name, and so does one around another.
func TestPickersKnowEnginesByName(t *testing.T) {
	e, err := discovery.New("http://prefill-7:8100", discovery.RolePrefill)
	require.NoError(t, err)
	e.ID = "llm/rank-7"
	set := newFleet(t, e).Set
	decider, err := decide.New(attest.NewQuarantine(pick.New(set, pick.RoundRobin())), decide.Always(), nil)
	require.NoError(t, err)
	limits, err := admit.New(decider, nil)
	require.NoError(t, err)
	for _, p := range []pdflow.Picker{limits, pick.FromHeader(set, discovery.Endpoint{}, nil)} {
		names, ok := p.Bind(nil, connector.Serving{}).(pdflow.EngineNamer)
		require.True(t, ok)
		for word, want := range map[string]bool{"prefill-7": true, "llm/rank-7": true, "rank-7": true, "llm": false} {
			assert.Equal(t, want, names.NamesEngine(word), word)
		}
	}
}

// Each picker knows what health probes have shown, and so does one around another.
func TestPickersKnowHowEnginesAre(t *testing.T) {
	e, err := discovery.New("http://decode-7:8100", discovery.RoleDecode)
	require.NoError(t, err)
	set := newFleet(t, e).Set
	decider, err := decide.New(attest.NewQuarantine(pick.New(set, pick.RoundRobin())), decide.Always(), nil)
	require.NoError(t, err)
	limits, err := admit.New(decider, nil)
	require.NoError(t, err)
	for _, p := range []pdflow.Picker{limits, pick.FromHeader(set, discovery.Endpoint{}, nil)} {
		health, ok := p.Bind(nil, connector.Serving{}).(pdflow.EngineHealth)
		require.True(t, ok)
		_, known := health.EngineHealth("nobody")
		assert.False(t, known)
		for _, well := range []bool{true, false} {
			set.SetHealthy(e.ID, well)
			is, known := health.EngineHealth(e.ID)
			assert.True(t, known)
			assert.Equal(t, well, is)
		}
	}
	functions, err := admit.New(pick.Func(nil), nil)
	require.NoError(t, err)
	_, known := functions.EngineHealth(e.ID)
	assert.False(t, known, "nobody to ask")
}
