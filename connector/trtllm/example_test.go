// SPDX-License-Identifier: Apache-2.0

package trtllm_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/trtllm"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// P gets the client's own limit. D gets P's parameters, and the prompt as P's token ids.
func ExampleNew() {
	c, err := trtllm.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"Hello","max_tokens":8}`))
	if err != nil {
		log.Fatal(err)
	}
	ids := [16]byte{7: 42, 15: 1} // contract.NewSession takes random ones
	s := contract.NewSessionWith(ids, r, "client-7", discovery.Endpoint{}, discovery.Endpoint{})
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
	response := &connector.PrefillResult{Status: http.StatusOK, Body: []byte(`{"prompt_token_ids":[1,15043],
		"choices":[{"finish_reason":"length","disaggregated_params":{"request_type":"context_only",
		"first_gen_tokens":[278],"ctx_request_id":9,"disagg_request_id":4612424890241253376}}]}`), At: time.Now()}
	prefill := contract.NewPrefillLeg(r, c.Traits())
	show("P", prefill, c.Prefill(context.Background(), s, prefill))
	decode := contract.NewLeg(r)
	show("D", decode, c.Decode(context.Background(), s, response, decode))
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
