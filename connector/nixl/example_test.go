// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/nixl"
)

// P is asked for one token and for a handoff; D gets that handoff byte for byte.
func ExampleNew() {
	c, err := nixl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(connectortest.Exchange{
		Request: `{"prompt":"Hello","max_tokens":8}`,
		Response: connectortest.Response{Body: []byte(`{"kv_transfer_params":{"do_remote_prefill":true,
		"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"e",
		"remote_request_id":"q","remote_host":"10.0.0.5","remote_port":5600,"tp_size":1}}`)},
	}.Show(c))
	// Output:
	// P {
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
	// D {
	//   "prompt": "Hello",
	//   "max_tokens": 8,
	//   "kv_transfer_params": {
	//     "do_remote_prefill": true,
	//     "do_remote_decode": false,
	//     "remote_block_ids": [
	//       [
	//         1
	//       ]
	//     ],
	//     "remote_engine_id": "e",
	//     "remote_request_id": "q",
	//     "remote_host": "10.0.0.5",
	//     "remote_port": 5600,
	//     "tp_size": 1
	//   }
	// }
}
