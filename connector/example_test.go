// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/handoff"
)

// shelf is a complete connector of a third party: P puts a prompt's KV into a store under a key that the gateway makes,
// and D takes it from there. It is a value that never changes, so any number of requests may use it at once.
type shelf struct {
	store string
	keep  time.Duration
}

// Traits declares what is constant. The lease tells the flow not to send decode once the store has forgotten the key.
func (s *shelf) Traits() connector.Traits {
	return connector.Traits{
		Name:    "shelf",
		Members: []string{connector.ParamsMember},
		Handoff: connector.Handoff{Member: "shelf_stored", Lease: s.keep},
	}
}

// Prefill asks P for one token, and tells P where to put the KV. The session's ID is new for every attempt.
func (s *shelf) Prefill(_ context.Context, session *connector.Session, leg *connector.Leg) error {
	return s.params(leg, session.ID, "put")
}

// Decode refuses a response in which P does not say that it has put the KV there: D would wait for it in vain.
func (s *shelf) Decode(_ context.Context, session *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	if stored, ok := p.Field("shelf_stored"); !ok || string(stored) != "true" {
		return handoff.NoTransfer("shelf_stored is not true")
	}
	return s.params(leg, session.ID, "take")
}

func (s *shelf) params(leg *connector.Leg, key, verb string) error {
	raw, err := json.Marshal(map[string]string{"do": verb, "key": key, "store": s.store})
	leg.Params(raw)
	return err
}

// shelfOptions are its settings, as they stand in a Spec's config.
type shelfOptions struct {
	Store string          `json:"store"`
	Keep  config.Duration `json:"keep"` // how long the store keeps a key
}

// init registers the connector by name. A program that imports the package can then configure it.
func init() {
	connector.Register("shelf", func(settings json.RawMessage) (connector.KVConnector, error) {
		o := shelfOptions{Keep: config.Duration(time.Minute)} // the defaults
		if err := config.Decode(settings, &o); err != nil {
			return nil, err
		}
		if o.Store == "" {
			return nil, &config.FieldError{Path: "store", Problem: "is missing", Remedy: "the store's name"}
		}
		return &shelf{store: o.Store, keep: time.Duration(o.Keep)}, nil
	}, "ShelfConnector")
}

// This example registers a connector of one's own and opens it by configuration.
func Example() {
	spec, err := config.ParseSpec([]byte(`{"type": "ShelfConnector", "config": {"store": "north", "keep": "20s"}}`))
	if err != nil {
		log.Fatal(err)
	}
	c, err := connector.Open(spec)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(c.Traits().Name, c.Traits().Order)

	// A flow lets the connector edit both legs, and sends them. Package connectortest only shows them.
	exchange := connectortest.Exchange{
		Request:  `{"prompt":"Hi","max_tokens":9,"stream":true}`,
		ID:       "k1", // 32 random digits, but for this page
		Response: connectortest.Response{Body: []byte(`{"shelf_stored":true}`)},
	}
	prefill, decode, err := exchange.Legs(context.Background(), c)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("P gets", prefill.Body)
	fmt.Println("D gets", decode.Body)
	// Output:
	// shelf prefill-then-decode
	// P gets {"prompt":"Hi","max_tokens":1,"stream":false,"kv_transfer_params":{"do":"put","key":"k1","store":"north"}}
	// D gets {"prompt":"Hi","max_tokens":9,"stream":true,"kv_transfer_params":{"do":"take","key":"k1","store":"north"}}
}

// A response of P without a usable handoff is ErrNoTransfer: the flow then never sends the decode leg.
func ExampleKVConnector_noTransfer() {
	exchange := connectortest.Exchange{
		Request:  `{"prompt":"Hello"}`,
		Response: connectortest.Response{Body: []byte(`{"shelf_stored":false}`)},
	}
	_, _, err := exchange.Legs(context.Background(), &shelf{store: "north"})
	fmt.Println(errors.Is(err, connector.ErrNoTransfer))
	// Output:
	// true
}

// A mistake in the settings is explained where it stands.
func ExampleOpen_wrongSettings() {
	_, err := connector.Open(config.Spec{Type: "shelf", Config: json.RawMessage(`{"stoer":"north","keep":20}`)})
	for _, fault := range config.FieldErrors(err) {
		fmt.Println(fault)
	}
	// Output:
	// stoer: unknown field; did you mean store?
	// keep: is a number without a unit; write a number and a unit, like "30s" or "1m30s"
}
