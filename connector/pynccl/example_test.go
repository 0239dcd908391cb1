// SPDX-License-Identifier: Apache-2.0

package pynccl_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/pynccl"
)

// The requests hold nothing about the transfer: D asks P for the KV by the prompt's tokens.
func ExampleNew() {
	c, err := pynccl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(connectortest.Exchange{
		Request: `{"prompt":"Hello","max_tokens":8}`,
	}.Show(c))
	// Output:
	// P {"prompt":"Hello","max_tokens":1,"stream":false}
	// D {"prompt":"Hello","max_tokens":8}
}
