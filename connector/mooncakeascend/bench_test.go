// SPDX-License-Identifier: Apache-2.0

package mooncakeascend_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/mooncakeascend"
)

// setups are the connectors that the benchmark measures.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	hybrid, err := mooncakeascend.NewHybrid(nil)
	require.NoError(t, err)
	s := session(t, connector.APIChat, connectortest.Chat2KB())
	return []connectortest.Measured{
		{Connector: open(t, nil), Session: s,
			Response: connectortest.Response{Handoff: strings.Replace(good, "[7,8,9]", connectortest.Blocks2KB(), 1)}},
		{Connector: hybrid, Session: s, Response: connectortest.Response{
			Handoff: strings.Replace(hybridHandoff, "[7,8,9]", connectortest.Blocks2KB(), 1)}},
	}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
