// SPDX-License-Identifier: Apache-2.0

package wrong

import (
	"context"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
)

const header = "X-KV-Ticket"

// Ticket is a connector whose handoff is a header of P's response. read says how it is read.
type Ticket struct {
	read func(p *connector.PrefillResult) (string, error)
}

// Traits declares the header, and the member in which D gets it.
func (Ticket) Traits() connector.Traits {
	return connector.Traits{Name: "ticket", Members: []string{"kv_ticket"},
		Handoff: connector.Handoff{Header: header, Lease: time.Minute}}
}

// Prefill adds nothing: the flow asks P for one token.
func (Ticket) Prefill(context.Context, *connector.Session, *connector.Leg) error { return nil }

// Decode gives D the ticket.
func (t Ticket) Decode(_ context.Context, _ *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
	ticket, err := t.read(p)
	if err != nil {
		return err
	}
	leg.Set("kv_ticket", connector.Quote(ticket))
	return nil
}

// NewTicket makes one that is right.
func NewTicket() Ticket {
	return Ticket{func(p *connector.PrefillResult) (string, error) { return handoff.Header(p, header) }}
}

// Tickets are wrong ones: each takes what others refuse.
func Tickets() map[string]Ticket {
	taking := func(good func(values []string) bool) Ticket {
		return Ticket{func(p *connector.PrefillResult) (string, error) {
			if p == nil || !good(p.Header.Values(header)) {
				return "", handoff.NoTransfer("no ticket")
			}
			return strings.Join(p.Header.Values(header), ","), nil
		}}
	}
	visible := func(v string) bool {
		return !strings.ContainsFunc(v, func(r rune) bool { return r <= ' ' || r > '~' })
	}
	return map[string]Ticket{
		"is absent": taking(func(v []string) bool {
			return len(v) == 0 || len(v) == 1 && v[0] != "" && visible(v[0]) && len(v[0]) < 1e5
		}),
		"is empty": taking(func(v []string) bool { return len(v) == 1 && visible(v[0]) && len(v[0]) < 1e5 }),
		"stands there twice": taking(func(v []string) bool {
			return len(v) > 0 && v[0] != "" && visible(v[0]) && len(v[0]) < 1e5
		}),
		"has a control character": taking(func(v []string) bool {
			return len(v) == 1 && strings.TrimSpace(v[0]) != "" && len(v[0]) < 1e5
		}),
		"has a megabyte": taking(func(v []string) bool { return len(v) == 1 && v[0] != "" && visible(v[0]) }),
	}
}
