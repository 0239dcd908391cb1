// SPDX-License-Identifier: Apache-2.0

package epd_test

import (
	"encoding/json"
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/connector/nixl"
)

// An encode stage before NIXL's legs: each media item goes to an encode engine, and the prefill leg carries what the
// engines returned.
func ExampleWrap() {
	inner, err := nixl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	c, err := epd.Wrap(inner, &epd.Options{Type: "nixl"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(connectortest.Exchange{
		API: connector.APIChat,
		Request: `{"messages":[{"role":"user","content":[{"type":"text","text":"What is it?"},` +
			`{"type":"image_url","image_url":{"url":"https://pictures.example/crane.png"}}]}]}`,
		Encoded: []json.RawMessage{json.RawMessage(
			`{"ec_transfer_params":{"hash-1":{"peer_host":"10.0.0.7","peer_port":5601,"size_bytes":4096}}}`)},
		Response: connectortest.Response{Handoff: `{"do_remote_prefill":true,"do_remote_decode":false,` +
			`"remote_block_ids":[[1]],"remote_engine_id":"e","remote_request_id":"q","remote_host":"10.0.0.5",` +
			`"remote_port":5600,"tp_size":1}`},
	}.Show(c))
	// Output:
	// P {
	//   "messages": [
	//     {
	//       "role": "user",
	//       "content": [
	//         {
	//           "type": "text",
	//           "text": "What is it?"
	//         },
	//         {
	//           "type": "image_url",
	//           "image_url": {
	//             "url": "https://pictures.example/crane.png"
	//           }
	//         }
	//       ]
	//     }
	//   ],
	//   "max_tokens": 1,
	//   "stream": false,
	//   "kv_transfer_params": {
	//     "do_remote_decode": true,
	//     "do_remote_prefill": false,
	//     "remote_engine_id": null,
	//     "remote_block_ids": null,
	//     "remote_host": null,
	//     "remote_port": null
	//   },
	//   "ec_transfer_params": {
	//     "hash-1": {
	//       "peer_host": "10.0.0.7",
	//       "peer_port": 5601,
	//       "size_bytes": 4096
	//     }
	//   }
	// }
	// D {
	//   "messages": [
	//     {
	//       "role": "user",
	//       "content": [
	//         {
	//           "type": "text",
	//           "text": "What is it?"
	//         },
	//         {
	//           "type": "image_url",
	//           "image_url": {
	//             "url": "https://pictures.example/crane.png"
	//           }
	//         }
	//       ]
	//     }
	//   ],
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
