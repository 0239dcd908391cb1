// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/offload"
	"github.com/pdkit/pdkit/discovery"
)

// setups are the connectors that the benchmark measures.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	r, err := connector.ParseRequest(connector.APIChat, []byte(connectortest.Chat2KB()))
	require.NoError(t, err)
	s := connector.NewSession(r, "id", endpoint(t, "http://10.0.0.1:8100", discovery.RolePrefill), discovery.Endpoint{})
	return []connectortest.Measured{
		{Connector: newConnector(t, nil), Session: s},
		{Name: "offload-p2p/serial", Connector: newConnector(t, &offload.Options{Dispatch: "serial"}), Session: s},
	}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
