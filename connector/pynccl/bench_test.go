// SPDX-License-Identifier: Apache-2.0

package pynccl_test

import (
	"testing"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
)

// setups are the connectors that the benchmark measures.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	return []connectortest.Measured{
		{Connector: open(t, ``), Session: session(t, connector.APIChat, connectortest.Chat2KB())},
	}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
