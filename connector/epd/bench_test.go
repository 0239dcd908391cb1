// SPDX-License-Identifier: Apache-2.0

package epd_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/connector/plainhttp"
)

// setups are the stage around the connector http: for a chat without media the stage is the only cost.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	inner, err := plainhttp.New(nil)
	require.NoError(t, err)
	c, err := epd.Wrap(inner, &epd.Options{Type: epd.Example})
	require.NoError(t, err)
	return []connectortest.Measured{
		{Name: "epd", Connector: c, Session: session(t, connector.APIChat, connectortest.Chat2KB())},
	}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
