// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/relay"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// P's engine answers with a member "transfer", and D's wants it in its request.
func ExampleNew() {
	c, err := relay.New(&relay.Options{Member: "transfer", Required: map[string]string{"peer": "string"}})
	if err != nil {
		log.Fatal(err)
	}
	r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"Hello","max_tokens":8}`))
	if err != nil {
		log.Fatal(err)
	}
	s := contract.NewSession(r, "client-7", discovery.Endpoint{}, discovery.Endpoint{})
	for _, response := range []string{`{"transfer":{"peer":"10.0.0.5:9000","at":1.50}}`, `{"transfer":{"at":1.50}}`} {
		decode := contract.NewLeg(r)
		p := &connector.PrefillResult{Status: http.StatusOK, Body: []byte(response), At: time.Now()}
		if err := c.Decode(context.Background(), s, p, decode); err != nil {
			fmt.Println(err)
			continue
		}
		body, err := contract.Body(decode)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(string(body))
	}
	// Output:
	// {"prompt":"Hello","max_tokens":8,"transfer":{"peer":"10.0.0.5:9000","at":1.50}}
	// no usable KV handoff in the prefill response: transfer: peer is not a string with text
}

// TPUConnector needs no settings.
func ExampleNewTPU() {
	c, err := relay.NewTPU(nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(c.Traits().Name, c.Traits().Handoff.Lease)
	// Output: tpu 3m0s
}
