// SPDX-License-Identifier: Apache-2.0

package lmcachepd_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/lmcachepd"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// P learns where D receives KV. D gets the client's request after P's ranks have sent their notices.
func ExampleNew() {
	c, err := lmcachepd.New(&lmcachepd.Options{})
	if err != nil {
		log.Fatal(err)
	}
	r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"Hello","max_tokens":8}`))
	if err != nil {
		log.Fatal(err)
	}
	p, err := discovery.New("http://10.0.0.5:8000", discovery.RolePrefill)
	if err != nil {
		log.Fatal(err)
	}
	d, err := discovery.New("http://10.0.0.6:8000", discovery.RoleDecode)
	if err != nil {
		log.Fatal(err)
	}
	d.Attributes = map[string]string{"receiverHost": "10.0.0.6", "receiverInitPorts": "8300",
		"receiverAllocPorts": "8400"}
	ids := [16]byte{7: 42, 15: 1} // contract.NewSession takes random ones
	s := contract.NewSessionWith(ids, r, "client-7", p, d)
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
	response := &connector.PrefillResult{Status: http.StatusOK, Body: []byte(`{}`), At: time.Now()}
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
	// D {
	//   "prompt": "Hello",
	//   "max_tokens": 8
	// }
}
