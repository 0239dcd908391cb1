// SPDX-License-Identifier: Apache-2.0

package multi_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"time"

	_ "github.com/pdkit/pdkit/connector/nixl"
	_ "github.com/pdkit/pdkit/connector/sharedstorage"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/multi"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// Both legs carry what the children need: here NIXL's members, and nothing for the store.
func ExampleNew() {
	c, err := multi.New(&multi.Options{Connectors: []json.RawMessage{
		[]byte(`{"type":"nixl"}`), []byte(`{"type":"sharedstorage"}`),
	}})
	if err != nil {
		log.Fatal(err)
	}
	r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"Hello","max_tokens":8}`))
	if err != nil {
		log.Fatal(err)
	}
	s := contract.NewSession(r, "client-7", discovery.Endpoint{}, discovery.Endpoint{})
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
	response := &connector.PrefillResult{Status: http.StatusOK,
		Body: []byte(`{"kv_transfer_params":{"do_remote_prefill":true,
		"do_remote_decode":false,"remote_block_ids":[[1]],"remote_engine_id":"e",
		"remote_request_id":"q","remote_host":"10.0.0.5","remote_port":5600,"tp_size":1}}`), At: time.Now()}
	prefill := contract.NewPrefillLeg(r, c.Traits())
	show("P", prefill, c.Prefill(context.Background(), s, prefill))
	decode := contract.NewLeg(r)
	show("D", decode, c.Decode(context.Background(), s, response, decode))
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
