// SPDX-License-Identifier: Apache-2.0

package nixlpush_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/nixlpush"
	"github.com/pdkit/pdkit/discovery"
)

// Both legs go out at once under one id. D learns from P's attributes where P is.
func ExampleNew() {
	c, err := nixlpush.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(connectortest.Exchange{
		Request: `{"prompt":"Hello","max_tokens":8}`,
		Prefill: discovery.Endpoint{Attributes: map[string]string{"engineID": "prefill-0", "sideChannelPort": "5600"}},
		Response: connectortest.Response{Handoff: `{"do_remote_prefill":true,"do_remote_decode":false,` +
			`"remote_block_ids":[[1]],"remote_engine_id":"prefill-0","remote_host":"10.0.0.5","remote_port":5600,` +
			`"tp_size":1,"remote_request_id":"cmpl-000000000000002a0000000000000001-0"}`},
	}.Show(c))
	// Output:
	// P X-Request-Id: 000000000000002a0000000000000001
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
	// D X-Request-Id: 000000000000002a0000000000000001
	// D {
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
