// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/offload"
	"github.com/pdkit/pdkit/discovery"
)

// P gets an id. D gets the same id, and the address at which P listens.
func ExampleNew() {
	c, err := offload.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(connectortest.Exchange{
		Request: `{"prompt":"Hello","max_tokens":8}`,
		Prefill: discovery.Endpoint{Attributes: map[string]string{"p2pHost": "10.0.0.5"}},
	}.Show(c))
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
