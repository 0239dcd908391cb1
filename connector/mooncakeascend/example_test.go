// SPDX-License-Identifier: Apache-2.0

package mooncakeascend_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/mooncakeascend"
)

// P hands over only if it ends by length. D gets the handoff byte for byte.
func ExampleNew() {
	c, err := mooncakeascend.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(connectortest.Exchange{
		Request: `{"prompt":"Hello","max_tokens":8}`,
		Response: connectortest.Response{Body: []byte(`{"choices":[{"finish_reason":"length"}],
		"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],
		"remote_engine_id":"e","remote_request_id":"q","remote_host":"10.0.0.5","remote_port":30000,
		"remote_block_size":128,
		"num_prompt_blocks":1,		"remote_ptp_size":1,"remote_pcp_size":1,"remote_dcp_size":1,
		"last_token_id":7,"remote_multi_nodes_meta_mapping":{}}}`)},
	}.Show(c))
	// Output:
	// P X-Request-Id: 000000000000002a0000000000000001
	// P {
	//   "prompt": "Hello",
	//   "max_tokens": 1,
	//   "stream": false,
	//   "min_tokens": 1,
	//   "kv_transfer_params": {
	//     "do_remote_decode": true,
	//     "do_remote_prefill": false,
	//     "remote_engine_id": null,
	//     "remote_block_ids": null,
	//     "remote_host": null,
	//     "remote_port": null
	//   }
	// }
	// D X-Request-Id: 000000000000002a0000000000000001
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
	//     "remote_port": 30000,
	//     "remote_block_size": 128,
	//     "num_prompt_blocks": 1,
	//     "remote_ptp_size": 1,
	//     "remote_pcp_size": 1,
	//     "remote_dcp_size": 1,
	//     "last_token_id": 7,
	//     "remote_multi_nodes_meta_mapping": {}
	//   }
	// }
}
