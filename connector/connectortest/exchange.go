// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"cmp"
	"context"
	"net/http"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// Exchange is one request and what the engines answer. [Exchange.Legs] shows what a connector makes of it: for examples
// and for a test of what is a protocol's own. [Run] has the rules of all connectors.
type Exchange struct {
	API             connector.API // zero is completions
	Request         string        // the client's body
	Header          http.Header   // the client's
	Prefill, Decode discovery.Endpoint
	Response        Response         // P's
	Call            connector.Caller // what answers a side call
	Event           connector.Event  // what a [connector.Expecter] gets
	ID              string           // the session's; "" is one that is always the same
	Random          [16]byte
}

// Sent is a leg as a flow would send it.
type Sent struct {
	Path   string
	Header http.Header // what the connector sets besides the client's
	Body   string
}

// Legs describes both legs as a flow does, in the connector's order, and sends nothing. Its error is the connector's:
// [connector.ErrNoTransfer] where P's response has no usable handoff, in which case the prefill leg is there all the
// same.
func (x Exchange) Legs(ctx context.Context, c connector.KVConnector) (prefill, decode Sent, err error) {
	r, err := connector.ParseRequest(cmp.Or(x.API, connector.APICompletions), []byte(x.Request))
	if err != nil {
		return prefill, decode, err
	}
	t := &trial{ctx: ctx, c: c, traits: c.Traits()}
	t.order = t.traits.Order
	if r, err = contract.Without(r, t.traits.Members); err != nil {
		return prefill, decode, err
	}
	s := contract.NewSessionWith(x.Random, r, plantedRequest, x.Prefill, x.Decode)
	s.ID, s.CreatedAt, s.Header = cmp.Or(x.ID, s.ID), began, x.Header
	p, err := t.playWith(s, means{
		quiet: true, call: x.Call,
		respond: func(*connector.Session, []byte) Response { return x.Response.fill(t.traits.Handoff, s.API) },
		event:   func(*connector.Session) connector.Event { return x.Event },
	})
	return p.prefill.shown(), p.decode.shown(), err
}

func (s sent) shown() Sent {
	h := http.Header{}
	for _, x := range s.header {
		h.Set(x.Name, x.Value)
	}
	return Sent{Path: s.path, Header: h, Body: string(s.body)}
}
