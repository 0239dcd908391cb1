// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/relay"
)

// P's engine answers with a member "transfer", and D's wants it in its request.
func ExampleNew() {
	c, err := relay.New(&relay.Options{Member: "transfer", Required: map[string]string{"peer": "string"}})
	if err != nil {
		log.Fatal(err)
	}
	for _, response := range []string{`{"transfer":{"peer":"10.0.0.5:9000","at":1.50}}`, `{"transfer":{"at":1.50}}`} {
		fmt.Print(connectortest.Exchange{
			Request:  `{"prompt":"Hello","max_tokens":8}`,
			Response: connectortest.Response{Body: []byte(response)},
		}.Show(c))
	}
	// Output:
	// P {"prompt":"Hello","max_tokens":1,"stream":false}
	// D {"prompt":"Hello","max_tokens":8,"transfer":{"peer":"10.0.0.5:9000","at":1.50}}
	// P {"prompt":"Hello","max_tokens":1,"stream":false}
	// calling Decode: no usable KV handoff in the prefill response: transfer: peer is not a string with text
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
