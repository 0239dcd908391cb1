// SPDX-License-Identifier: Apache-2.0

package mooncakestore_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/mooncakestore"
)

// The requests hold nothing about the pool: P fills it, and D finds the blocks by the prompt.
func ExampleNew() {
	c, err := mooncakestore.New(&mooncakestore.Options{})
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
