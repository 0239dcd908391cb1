// SPDX-License-Identifier: Apache-2.0

// Package ticket is a third party's connector: P's response names the KV in the header X-KV-Ticket, and D fetches it by
// the member kv_ticket.
package ticket

import (
	"context"
	"encoding/json"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/connector/handoff"
)

const header, member = "X-KV-Ticket", "kv_ticket"

func init() { connector.Register("ticket", New) }

// Connector is the connector "ticket".
type Connector struct{}

// New reads the settings, of which there are none.
func New(settings json.RawMessage) (connector.KVConnector, error) {
	return Connector{}, config.Decode(settings, &struct{}{})
}

// Traits declares the protocol.
func (Connector) Traits() connector.Traits {
	return connector.Traits{Name: "ticket", Members: []string{member}, Handoff: connector.Handoff{Header: header},
		Lease: 30 * time.Second}
}

// Prefill asks P for one token.
func (Connector) Prefill(_ context.Context, _ *connector.Session, leg *connector.Leg) error {
	leg.Normalize()
	leg.DropThinkingBudget()
	return nil
}

// Decode hands P's ticket to D.
func (Connector) Decode(_ context.Context, _ *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
	ticket, err := handoff.Header(p, header)
	leg.Set(member, connector.Quote(ticket))
	return err
}
