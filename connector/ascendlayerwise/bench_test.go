// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/ascendlayerwise"
	"github.com/pdkit/pdkit/connector/connectortest"
)

// setups are the connectors that the benchmark measures.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	c, err := ascendlayerwise.New(nil)
	require.NoError(t, err)
	s := session(t, connector.APIChat, connectortest.Chat2KB())
	body := strings.Replace(callback("chatcmpl-"+s.ID), "[11,12]", connectortest.Blocks2KB(), 1)
	s.Event = connector.Event{Body: []byte(body), At: time.Now()}
	return []connectortest.Measured{{Connector: c, Session: s}}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
