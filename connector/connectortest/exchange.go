// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// Exchange is one request and what the engines answer. [Exchange.Legs] shows what a connector makes of it: for examples
// and for a test of what is a protocol's own. [Run] has the rules of all connectors.
type Exchange struct {
	API             connector.API      // zero is completions
	Request         string             // the client's body
	Header          http.Header        // the client's
	Prefill, Decode discovery.Endpoint // without a URL: http://10.0.0.5:8000, http://10.0.0.6:8000
	Response        Response           // P's
	Encoded         []json.RawMessage  // what the encode engines answer, in the order of the items
	Call            connector.Caller   // what answers a side call
	Event           connector.Event    // what a [connector.Expecter] gets
	ID              string             // the session's; "" is one that is always the same
	Random          [16]byte           // zero is one that is always the same
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
	p, err := x.play(ctx, c)
	if p == nil {
		return prefill, decode, err
	}
	return p.prefill.shown(), p.decode.shown(), err
}

// Show returns the legs as text for people: P's and D's, each with the headers that the connector sets, and the error,
// if there is one.
func (x Exchange) Show(c connector.KVConnector) string {
	p, err := x.play(context.Background(), c)
	var text strings.Builder
	if p != nil {
		p.prefill.write(&text, "P")
		p.decode.write(&text, "D")
	}
	if err != nil {
		fmt.Fprintln(&text, err)
	}
	return text.String()
}

func (x Exchange) play(ctx context.Context, c connector.KVConnector) (*played, error) {
	r, err := connector.ParseRequest(cmp.Or(x.API, connector.APICompletions), []byte(x.Request))
	if err != nil {
		return nil, err
	}
	t := &trial{ctx: ctx, c: c, traits: c.Traits()}
	t.order = t.traits.Order
	if r, err = contract.Without(r, t.traits.Members); err != nil {
		return nil, err
	}
	s := contract.NewSessionWith(cmp.Or(x.Random, [16]byte{7: 42, 15: 1}), r, plantedRequest,
		at(x.Prefill, "http://10.0.0.5:8000", discovery.RolePrefill),
		at(x.Decode, "http://10.0.0.6:8000", discovery.RoleDecode))
	s.ID, s.CreatedAt, s.Header = cmp.Or(x.ID, s.ID), began, x.Header
	encoded := x.Encoded
	return t.playWith(s, means{
		quiet: true, call: x.Call,
		encoded: func(*connector.Session, connector.Item) (response json.RawMessage) {
			if len(encoded) > 0 {
				response, encoded = encoded[0], encoded[1:]
			}
			return response
		},
		respond: func(*connector.Session, []byte) Response { return x.Response.fill(t.traits.Handoff, s.API) },
		event:   func(*connector.Session) connector.Event { return x.Event },
	})
}

// at gives an endpoint an address if it has none.
func at(e discovery.Endpoint, address string, role discovery.Role) discovery.Endpoint {
	if e.URL != nil {
		return e
	}
	made, err := discovery.New(address, role)
	if err != nil {
		panic(err) // the addresses are this package's own
	}
	made.Attributes = e.Attributes
	return made
}

func (s sent) shown() Sent {
	h := http.Header{}
	for _, x := range s.header {
		h.Set(x.Name, x.Value)
	}
	return Sent{Path: s.path, Header: h, Body: string(s.body)}
}

// write shows a leg, if there is one. A long body takes several lines.
func (s sent) write(w *strings.Builder, who string) {
	if s.body == nil {
		return
	}
	body := bytes.NewBuffer(s.body)
	if body.Len() > 80 {
		body = &bytes.Buffer{}
		_ = json.Indent(body, s.body, "", "  ") // what is not JSON is left out
	}
	for _, h := range s.header {
		fmt.Fprintf(w, "%s %s: %s\n", who, h.Name, h.Value)
	}
	fmt.Fprintln(w, who, body)
}
