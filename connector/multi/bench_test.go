// SPDX-License-Identifier: Apache-2.0

package multi_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/multi"
)

// setups are a MultiConnector with NIXL and a store.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	kvbm, err := multi.NewKVBM(nil)
	require.NoError(t, err)
	s := session(t, connector.APIChat, connectortest.Chat2KB())
	response := connectortest.Response{Handoff: strings.Replace(handoff, "[1]", connectortest.Blocks2KB(), 1)}
	return []connectortest.Measured{
		{Connector: open(t, nixlAndStore), Session: s, Response: response},
		{Connector: kvbm, Session: s, Response: response},
	}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
