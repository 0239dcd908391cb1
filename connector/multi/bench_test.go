// SPDX-License-Identifier: Apache-2.0

package multi_test

import (
	"strings"
	"testing"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
)

// setups are a MultiConnector with NIXL and a store.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	return []connectortest.Measured{{
		Connector: open(t, nixlAndStore), Session: session(t, connector.APIChat, connectortest.Chat2KB()),
		Response: connectortest.Response{Handoff: strings.Replace(handoff, "[1]", connectortest.Blocks2KB(), 1)},
	}}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
