// SPDX-License-Identifier: Apache-2.0

package p2pnccl_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/p2pnccl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// Both engines learn the other's address from the id.
func ExampleNew() {
	c, err := p2pnccl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"Hello","max_tokens":8}`))
	if err != nil {
		log.Fatal(err)
	}
	p, err := discovery.New("http://10.0.0.5:8000", discovery.RolePrefill)
	if err != nil {
		log.Fatal(err)
	}
	p.Attributes = map[string]string{"zmqAddress": "10.0.0.5:21001"}
	d, err := discovery.New("http://10.0.0.6:8000", discovery.RoleDecode)
	if err != nil {
		log.Fatal(err)
	}
	d.Attributes = map[string]string{"zmqAddress": "10.0.0.6:22001"}
	ids := [16]byte{7: 42, 15: 1} // contract.NewSession takes random ones
	s := contract.NewSessionWith(ids, r, "client-7", p, d)
	show := func(name string, leg *connector.Leg, err error) {
		if err != nil {
			log.Fatal(err)
		}
		body, err := contract.Body(leg)
		if err != nil {
			log.Fatal(err)
		}
		var lines bytes.Buffer
		if err := json.Indent(&lines, body, "", "  "); err != nil {
			log.Fatal(err)
		}
		fmt.Println(name, contract.Leg(leg).Headers, lines.String())
	}
	response := &connector.PrefillResult{Status: http.StatusOK, Body: []byte(`{}`), At: time.Now()}
	prefill := contract.NewPrefillLeg(r, c.Traits())
	show("P", prefill, c.Prefill(context.Background(), s, prefill))
	decode := contract.NewLeg(r)
	show("D", decode, c.Decode(context.Background(), s, response, decode))
	// Output:
	// P [{X-Request-Id ___prefill_addr_10.0.0.5:21001___decode_addr_10.0.0.6:22001_000000000000002a0000000000000001}] {
	//   "prompt": "Hello",
	//   "max_tokens": 1,
	//   "stream": false
	// }
	// D [{X-Request-Id ___prefill_addr_10.0.0.5:21001___decode_addr_10.0.0.6:22001_000000000000002a0000000000000001}] {
	//   "prompt": "Hello",
	//   "max_tokens": 8
	// }
}
