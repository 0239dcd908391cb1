// SPDX-License-Identifier: Apache-2.0

package ticket_test

import (
	"testing"

	_ "example.com/ticket"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
)

// harness has what the suite cannot take from Traits: its name, and a valid ticket.
var harness = connectortest.Harness{
	Name: "ticket",
	Response: func(s *connector.Session, _ []byte) connectortest.Response {
		return connectortest.Response{Handoff: "ticket-" + s.ID}
	},
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }
