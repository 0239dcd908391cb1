// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/nixl"
)

// setups are the connectors that the benchmark measures: the plain one, and one with bidirectional at a conversation's
// first turn.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	s := session(t, connector.APIChat, connectortest.Chat2KB())
	response := connectortest.Response{Handoff: strings.Replace(good, "[13,14]", connectortest.Blocks2KB(), 1)}
	s.Header = http.Header{"X-Session-Id": {"talk-1"}}
	talk, err := nixl.New(&nixl.Options{Bidirectional: true})
	require.NoError(t, err)
	return []connectortest.Measured{
		{Connector: open(t, nil), Session: s, Response: response},
		{Name: "nixl/bidirectional", Connector: talk, Session: s, Response: response},
	}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
