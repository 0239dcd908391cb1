// SPDX-License-Identifier: Apache-2.0

package epd_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
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
	r, err := connector.ParseRequest(connector.APIChat, []byte(`{"messages":[{"role":"user","content":[
		{"type":"text","text":"What is it?"},
		{"type":"image_url","image_url":{"url":"https://pictures.example/crane.png"}}]}]}`))
	if err != nil {
		log.Fatal(err)
	}
	s := contract.NewSession(r, "client-7", discovery.Endpoint{}, discovery.Endpoint{})

	encoder, _ := connector.As[connector.Encoder](c)
	items := encoder.Items(s)
	fmt.Println("items to encode:", len(items))
	err = encoder.Merge(s, []json.RawMessage{
		[]byte(`{"ec_transfer_params":{"hash-1":{"peer_host":"10.0.0.7","peer_port":5601,"size_bytes":4096}}}`),
	})
	if err != nil {
		log.Fatal(err)
	}
	prefill := contract.NewPrefillLeg(r, c.Traits())
	if err := c.Prefill(context.Background(), s, prefill); err != nil {
		log.Fatal(err)
	}
	params, _ := prefill.Current("ec_transfer_params")
	fmt.Println(string(params))
	// Output:
	// items to encode: 1
	// {"hash-1":{"peer_host":"10.0.0.7","peer_port":5601,"size_bytes":4096}}
}
