// SPDX-License-Identifier: Apache-2.0

package check_test

import (
	"fmt"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
)

// A scheduler that picks by itself asks what the protocol allows before it sends anything.
func Example() {
	c, err := nixl.New(nil)
	if err != nil {
		panic(err)
	}
	request, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":["one","two"]}`))
	if err != nil {
		panic(err)
	}
	fmt.Println(check.Of(c).CheckRequest(request))

	p := discovery.Endpoint{ID: "p-1", Role: discovery.RolePrefill, Model: "llama"}
	d := discovery.Endpoint{ID: "d-1", Role: discovery.RoleDecode, Model: "qwen"}
	fmt.Println(check.Of(c).CheckPair(p, d))
	// Output:
	// prefill and decode engines cannot carry this together: prompt
	// engines p-1 and d-1 cannot exchange KV: their model does not fit
}
