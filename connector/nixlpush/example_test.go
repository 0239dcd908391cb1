// SPDX-License-Identifier: Apache-2.0

package nixlpush_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixlpush"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// Both legs go out at once under one id. D learns from P's attributes where P is.
func ExampleNew() {
	c, err := nixlpush.New(nil)
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
	p.Attributes = map[string]string{"engineID": "prefill-0", "sideChannelPort": "5600"}
	d, err := discovery.New("http://10.0.0.6:8000", discovery.RoleDecode)
	if err != nil {
		log.Fatal(err)
	}
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
	prefill := contract.NewPrefillLeg(r, c.Traits())
	show("P", prefill, c.Prefill(context.Background(), s, prefill))
	decode := contract.NewLeg(r)
	show("D", decode, c.Decode(context.Background(), s, nil, decode))
	// Output:
	// P [{X-Request-Id 000000000000002a0000000000000001}] {
	//   "prompt": "Hello",
	//   "max_tokens": 1,
	//   "stream": false,
	//   "kv_transfer_params": {
	//     "do_remote_decode": true,
	//     "do_remote_prefill": false,
	//     "remote_engine_id": null,
	//     "remote_block_ids": null,
	//     "remote_host": null,
	//     "remote_port": null
	//   }
	// }
	// D [{X-Request-Id 000000000000002a0000000000000001}] {
	//   "prompt": "Hello",
	//   "max_tokens": 8,
	//   "kv_transfer_params": {
	//     "do_remote_decode": false,
	//     "do_remote_prefill": true,
	//     "remote_engine_id": "prefill-0",
	//     "remote_host": "10.0.0.5",
	//     "remote_port": 5600,
	//     "tp_size": 1,
	//     "pp_size": 1,
	//     "remote_request_id": "000000000000002a0000000000000001"
	//   }
	// }
}
