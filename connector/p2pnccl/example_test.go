// SPDX-License-Identifier: Apache-2.0

package p2pnccl_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/p2pnccl"
	"github.com/pdkit/pdkit/discovery"
)

// Both engines learn the other's address from the id.
func ExampleNew() {
	c, err := p2pnccl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(connectortest.Exchange{
		Request: `{"prompt":"Hello","max_tokens":8}`,
		Prefill: discovery.Endpoint{Attributes: map[string]string{"zmqAddress": "10.0.0.5:21001"}},
		Decode:  discovery.Endpoint{Attributes: map[string]string{"zmqAddress": "10.0.0.6:22001"}},
	}.Show(c))
	// Output:
	// P X-Request-Id: ___prefill_addr_10.0.0.5:21001___decode_addr_10.0.0.6:22001_000000000000002a0000000000000001
	// P {"prompt":"Hello","max_tokens":1,"stream":false}
	// D X-Request-Id: ___prefill_addr_10.0.0.5:21001___decode_addr_10.0.0.6:22001_000000000000002a0000000000000001
	// D {"prompt":"Hello","max_tokens":8}
}
