// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// The program knows which engine is to decode, since that has the conversation in its cache, and leaves the choice of
// the prefill engine to the picker.
func ExampleFlow_Do_decode() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())

	d, _ := discovery.New(decode.URL(), discovery.RoleDecode)
	in := &pdflow.Request{
		API:    connector.APICompletions,
		Body:   []byte(`{"prompt":` + prompt + `,"max_tokens":8}`),
		Decode: d.ID,
	}
	resp, err := flow.Do(context.Background(), in)
	if err != nil {
		log.Fatal(err)
	}
	resp.Body.Close()
	fmt.Println(resp.Status, resp.Mode)

	in.Decode = "10.0.0.9:8000" // in no list
	_, err = flow.Do(context.Background(), in)
	fmt.Println(errors.Is(err, pdflow.CodeNotFound))
	// Output:
	// 200 disaggregated
	// true
}
