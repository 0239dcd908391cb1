// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/ascendlayerwise"
	"github.com/pdkit/pdkit/connector/connectortest"
)

// D's leg goes out first. When D has blocks it calls the gateway back, and P's leg then carries what D sent.
func ExampleNew() {
	c, err := ascendlayerwise.New(&ascendlayerwise.Options{CallbackURL: "http://10.0.0.1:8600"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(connectortest.Exchange{
		Request: `{"prompt":"Hello","max_tokens":8}`,
		Event: connector.Event{Body: []byte(`{"token_ids":[],"request_id":"cmpl-000000000000002a0000000000000001-0",` +
			`"do_remote_prefill":false,"do_remote_decode":true,"remote_block_ids":[[11,12]],` +
			`"remote_block_size":[128],"remote_engine_id":"d0","remote_host":"10.0.0.6","remote_port":5000,` +
			`"remote_tp_size":8,` +
			`"remote_pcp_size":1,"remote_dcp_size":1,"remote_cached_tokens":0}`)},
	}.Show(c))
	// Output:
	// P X-Request-Id: 000000000000002a0000000000000001
	// P {
	//   "prompt": "Hello",
	//   "max_tokens": 1,
	//   "stream": false,
	//   "min_tokens": 1,
	//   "kv_transfer_params": {
	//     "token_ids": [],
	//     "request_id": "cmpl-000000000000002a0000000000000001-0",
	//     "do_remote_prefill": false,
	//     "do_remote_decode": true,
	//     "remote_block_ids": [
	//       [
	//         11,
	//         12
	//       ]
	//     ],
	//     "remote_block_size": [
	//       128
	//     ],
	//     "remote_engine_id": "d0",
	//     "remote_host": "10.0.0.6",
	//     "remote_port": 5000,
	//     "remote_tp_size": 8,
	//     "remote_pcp_size": 1,
	//     "remote_dcp_size": 1,
	//     "remote_cached_tokens": 0
	//   }
	// }
	// D X-Request-Id: 000000000000002a0000000000000001
	// D {
	//   "prompt": "Hello",
	//   "max_tokens": 8,
	//   "kv_transfer_params": {
	//     "do_remote_decode": false,
	//     "do_remote_prefill": true,
	//     "metaserver": "http://10.0.0.1:8600/v1/metaserver"
	//   }
	// }
}
