// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/offload"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// P gets an id. D gets the same id, and the address at which P listens.
func ExampleNew() {
	c, err := offload.New(nil)
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
	p.Attributes = map[string]string{"p2pHost": "10.0.0.5"}
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
		fmt.Println(name, lines.String())
	}
	prefill := contract.NewPrefillLeg(r, c.Traits())
	show("P", prefill, c.Prefill(context.Background(), s, prefill))
	decode := contract.NewLeg(r)
	show("D", decode, c.Decode(context.Background(), s, nil, decode))
	// Output:
	// P {
	//   "prompt": "Hello",
	//   "max_tokens": 1,
	//   "stream": false,
	//   "kv_transfer_params": {
	//     "remote_decoder": {
	//       "kv_request_id": "00000000-0000-402a-8000-000000000001"
	//     }
	//   }
	// }
	// D {
	//   "prompt": "Hello",
	//   "max_tokens": 8,
	//   "kv_transfer_params": {
	//     "remote_prefiller": {
	//       "kv_request_id": "00000000-0000-402a-8000-000000000001",
	//       "remote_host": "10.0.0.5",
	//       "remote_port": 7777
	//     }
	//   }
	// }
}
