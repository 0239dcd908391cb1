// SPDX-License-Identifier: Apache-2.0

package nixlpush_test

import (
	"strings"
	"testing"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/nixlpush"
)

// setups are the connectors that the benchmark measures.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	s := session(t, connector.APIChat, connectortest.Chat2KB(), attributes())
	response := connectortest.Response{Handoff: strings.Replace(handoff(s), "[1,2]", connectortest.Blocks2KB(), 1)}
	return []connectortest.Measured{
		{Connector: open(t, nil), Session: s, Response: response},
		{Name: "nixl-push/serial", Connector: open(t, &nixlpush.Options{Dispatch: "serial"}), Session: s,
			Response: response},
	}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
