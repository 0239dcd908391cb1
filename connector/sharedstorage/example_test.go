// SPDX-License-Identifier: Apache-2.0

package sharedstorage_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/sharedstorage"
)

// The requests hold nothing about the folder: P writes into it, and D finds the KV by the prompt.
func ExampleNew() {
	c, err := sharedstorage.New(&sharedstorage.Options{})
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
