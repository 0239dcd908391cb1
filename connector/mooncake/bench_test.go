// SPDX-License-Identifier: Apache-2.0

package mooncake_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
)

// setups are the connectors that the benchmark measures.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	c := newConnector(t, nil)
	s := session(t, connector.APIChat, connectortest.Chat2KB(), endpoint(t, "http://10.0.0.1:8100"))
	require.NoError(t, prepare(t.Context(), c, s, (&server{}).say(oneRank).call))
	return []connectortest.Measured{{Connector: c, Session: s}}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
