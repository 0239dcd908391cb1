// SPDX-License-Identifier: Apache-2.0

package moriio_test

import (
	"fmt"
	"log"
	"strings"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/moriio"
)

// Both legs go out at once, and each names the other engine's address.
func ExampleNew() {
	c, err := moriio.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	legs := connectortest.Exchange{
		Request: `{"prompt":"Hello","max_tokens":8}`,
		Response: connectortest.Response{
			Handoff: `{"do_remote_prefill":true,"transfer_id":"tx-00000000-0000-402a-8000-000000000001"}`},
	}.Show(c)
	fmt.Print(strings.ReplaceAll(legs, "___decode", "\n  ___decode")) // one word, in truth
	// Output:
	// P X-Request-Id: ___prefill_addr_host:10.0.0.5,handshake:6301,notify:61005
	//   ___decode_addr_host:10.0.0.6,handshake:6301,notify:61005_000000000000002a0000000000000001
	// P X-data-parallel-rank: 0
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
	//     "transfer_id": "tx-00000000-0000-402a-8000-000000000001",
	//     "remote_host": "10.0.0.6",
	//     "remote_handshake_port": 6301,
	//     "remote_notify_port": 61005,
	//     "remote_dp_size": 1
	//   }
	// }
	// D X-Request-Id: ___prefill_addr_host:10.0.0.5,handshake:6301,notify:61005
	//   ___decode_addr_host:10.0.0.6,handshake:6301,notify:61005_000000000000002a0000000000000001
	// D X-data-parallel-rank: 0
	// D {
	//   "prompt": "Hello",
	//   "max_tokens": 8,
	//   "kv_transfer_params": {
	//     "do_remote_decode": false,
	//     "do_remote_prefill": true,
	//     "transfer_id": "tx-00000000-0000-402a-8000-000000000001",
	//     "remote_engine_id": null,
	//     "remote_block_ids": null,
	//     "remote_host": "10.0.0.5",
	//     "remote_handshake_port": 6301,
	//     "remote_notify_port": 61005,
	//     "remote_dp_size": 1,
	//     "remote_dp_rank": 0,
	//     "remote_dp_rank_override": true,
	//     "is_request_leader": true
	//   }
	// }
}
