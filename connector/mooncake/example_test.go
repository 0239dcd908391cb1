// SPDX-License-Identifier: Apache-2.0

package mooncake_test

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"strings"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/mooncake"
)

// Before the legs the connector asks P's bootstrap server for P's engine id, which is new at each start. Then both legs
// go out at once.
func ExampleNew() {
	c, err := mooncake.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(connectortest.Exchange{
		Request: `{"prompt":"Hello","max_tokens":8}`,
		Call: func(r *http.Request) (*http.Response, error) {
			fmt.Println(r.Method, r.URL)
			body := `{"0":{"engine_id":"e-1","worker_addr":{"0":{"0":"tcp://10.0.0.5:7001"}}}}`
			return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(body))}, nil
		},
	}.Show(c))
	// Output:
	// GET http://10.0.0.5:8998/query
	// P {
	//   "prompt": "Hello",
	//   "max_tokens": 1,
	//   "stream": false,
	//   "min_tokens": 1,
	//   "kv_transfer_params": {
	//     "do_remote_decode": true,
	//     "do_remote_prefill": false,
	//     "transfer_id": "xfer-00000000-0000-402a-8000-000000000001"
	//   }
	// }
	// D {
	//   "prompt": "Hello",
	//   "max_tokens": 8,
	//   "kv_transfer_params": {
	//     "do_remote_decode": false,
	//     "do_remote_prefill": true,
	//     "remote_bootstrap_addr": "http://10.0.0.5:8998",
	//     "remote_engine_id": "e-1",
	//     "transfer_id": "xfer-00000000-0000-402a-8000-000000000001"
	//   }
	// }
}
