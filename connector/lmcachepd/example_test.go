// SPDX-License-Identifier: Apache-2.0

package lmcachepd_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/lmcachepd"
	"github.com/pdkit/pdkit/discovery"
)

// P learns where D receives KV. D gets the client's request after P's ranks have sent their notices.
func ExampleNew() {
	c, err := lmcachepd.New(&lmcachepd.Options{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(connectortest.Exchange{
		Request: `{"prompt":"Hello","max_tokens":8}`,
		Decode: discovery.Endpoint{Attributes: map[string]string{
			"receiverHost": "10.0.0.6", "receiverInitPorts": "8300",
			"receiverAllocPorts": "8400"}},
	}.Show(c))
	// Output:
	// P {
	//   "prompt": "Hello",
	//   "max_tokens": 1,
	//   "stream": false,
	//   "kv_transfer_params": {
	//     "disagg_spec": {
	//       "req_id": "000000000000002a0000000000000001",
	//       "receiver_host": "10.0.0.6",
	//       "receiver_init_port": [
	//         8300
	//       ],
	//       "receiver_alloc_port": [
	//         8400
	//       ]
	//     }
	//   }
	// }
	// D {"prompt":"Hello","max_tokens":8}
}
