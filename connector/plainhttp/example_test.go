// SPDX-License-Identifier: Apache-2.0

package plainhttp_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/plainhttp"
)

// P is asked for one token, D for the whole response; nothing goes from one to the other.
func ExampleNew() {
	c, err := plainhttp.New(nil)
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
