// SPDX-License-Identifier: Apache-2.0

package moriio_test

import (
	"strings"
	"testing"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/moriio"
)

// setups are the connectors that the benchmark measures.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	s := session(t, connector.APIChat, connectortest.Chat2KB(), nil, nil)
	response := connectortest.Response{Handoff: strings.Replace(handoff(s), "[7,8,9]", connectortest.Blocks2KB(), 1)}
	return []connectortest.Measured{
		{Name: "moriio/write", Connector: open(t, nil), Session: s, Response: response},
		{Name: "moriio/read", Connector: open(t, &moriio.Options{Mode: moriio.ModeRead}), Session: s,
			Response: response},
	}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
