// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/lmcache"
)

// setups are the connectors that the benchmark measures.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	c, err := lmcache.New(nil)
	require.NoError(t, err)
	return []connectortest.Measured{{Connector: c, Session: session(t, connector.APIChat, connectortest.Chat2KB())}}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
