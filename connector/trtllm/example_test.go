// SPDX-License-Identifier: Apache-2.0

package trtllm_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/trtllm"
)

// P gets the client's own limit. D gets P's parameters, and the prompt as P's token ids.
func ExampleNew() {
	c, err := trtllm.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(connectortest.Exchange{
		Request: `{"prompt":"Hello","max_tokens":8}`,
		Response: connectortest.Response{Body: []byte(`{"prompt_token_ids":[1,15043],
		"choices":[{"finish_reason":"length","disaggregated_params":{"request_type":"context_only",
		"first_gen_tokens":[278],"ctx_request_id":9,"disagg_request_id":4612424890241253376}}]}`)},
	}.Show(c))
	// Output:
	// P {
	//   "prompt": "Hello",
	//   "max_tokens": 8,
	//   "disaggregated_params": {
	//     "request_type": "context_only",
	//     "disagg_request_id": 4612424890241253376
	//   },
	//   "stream": false
	// }
	// D {
	//   "prompt": [
	//     1,
	//     15043
	//   ],
	//   "max_tokens": 8,
	//   "disaggregated_params": {
	//     "request_type": "generation_only",
	//     "first_gen_tokens": [
	//       278
	//     ],
	//     "ctx_request_id": 9,
	//     "disagg_request_id": 4612424890241253376
	//   }
	// }
}
