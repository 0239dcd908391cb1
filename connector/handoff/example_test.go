// SPDX-License-Identifier: Apache-2.0

package handoff_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
)

// A connector's Decode gives P's handoff to D unchanged, after checking that it holds what D needs.
func Example() {
	check := func(raw json.RawMessage) error {
		o := handoff.Read(raw)
		o.Text("remote_host")
		o.Port("remote_port")
		return o.Close()
	}
	for _, body := range []string{
		`{"kv_transfer_params": {"remote_host": "10.0.0.1", "remote_port": 5600, "new": 1}}`,
		`{"kv_transfer_params": {"remote_host": "10.0.0.1"}}`,
	} {
		p := &connector.PrefillResult{Status: http.StatusOK, Body: []byte(body), At: time.Now()}
		raw, err := handoff.Member(p, connector.ParamsMember, check)
		fmt.Println(string(raw), err, errors.Is(err, connector.ErrNoTransfer))
	}
	// Output:
	// {"remote_host": "10.0.0.1", "remote_port": 5600, "new": 1} <nil> false
	//  no usable KV handoff in the prefill response: kv_transfer_params: remote_port is not a port number true
}
