// SPDX-License-Identifier: Apache-2.0

package lmcachepd_test

import (
	"strings"
	"testing"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/lmcachepd"
)

// setups are the plain connector, and one that uses P's first token, with 512 token ids.
func setups(t testing.TB) []connectortest.Measured {
	t.Helper()
	s := session(t, connector.APIChat, connectortest.Chat2KB(), receiverOfTwo)
	s.Event = harness().Event(s)
	ids := strings.NewReplacer("[259,1,2]", "["+strings.Repeat("15043,", 511)+"2]",
		`"prompt_tokens":3,"total_tokens":4`, `"prompt_tokens":512,"total_tokens":513`)
	first := withFirstToken().Response(s, nil)
	first.Body = []byte(ids.Replace(string(first.Body)))
	return []connectortest.Measured{
		{Connector: open(t, nil), Session: s},
		{
			Name: "lmcache-pd/first-token", Connector: open(t, &lmcachepd.Options{RetFirstToken: true}), Session: s,
			Response: first,
		},
	}
}

func BenchmarkLegs(b *testing.B) { connectortest.BenchmarkLegs(b, setups(b)...) }

func TestLegBudget(t *testing.T) { connectortest.LegBudget(t, setups(t)...) }
