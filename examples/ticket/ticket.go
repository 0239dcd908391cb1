// SPDX-License-Identifier: Apache-2.0

// Package ticket is a connector: P names its KV in the header X-KV-Ticket, and D fetches it once, by member kv_ticket.
package ticket

import (
	"context"
	"encoding/json"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
)

const header, member = "X-KV-Ticket", "kv_ticket"

func init() {
	connector.Register("ticket", func(settings json.RawMessage) (connector.KVConnector, error) {
		return New(), config.Decode(settings, &struct{}{}) // it has no settings: whatever is set is a mistake
	}, "TicketConnector")
}

// Connector is the connector "ticket".
type Connector struct{}

// New returns the connector.
func New() Connector { return Connector{} }

// Traits declares the protocol. A client's own ticket is stripped. A ticket is used until 5 s before its lease ends.
func (Connector) Traits() connector.Traits {
	return connector.Traits{Name: "ticket", Members: []string{member},
		Handoff: connector.Handoff{Header: header, Lease: 30 * time.Second}}
}

// Prefill adds nothing: the flow asks P for one token.
func (Connector) Prefill(context.Context, *connector.Session, *connector.Leg) error { return nil }

// Decode gives P's ticket to D. If P gave none, D is not asked: the error is [connector.ErrNoTransfer].
func (Connector) Decode(_ context.Context, _ *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
	ticket, err := handoff.Header(p, header)
	if err == nil {
		leg.Set(member, connector.Quote(ticket))
	}
	return err
}
