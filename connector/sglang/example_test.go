// SPDX-License-Identifier: Apache-2.0

package sglang_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/sglang"
)

// Both legs go out at once with the same room, by which the engines find each other.
func ExampleNew() {
	c, err := sglang.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(connectortest.Exchange{
		Request: `{"prompt":"Hello","max_tokens":8}`,
	}.Show(c))
	// Output:
	// P {
	//   "prompt": "Hello",
	//   "max_tokens": 1,
	//   "bootstrap_host": "10.0.0.5",
	//   "bootstrap_port": 8998,
	//   "bootstrap_room": 1513209474796486656,
	//   "stream": false
	// }
	// D {
	//   "prompt": "Hello",
	//   "max_tokens": 8,
	//   "bootstrap_host": "10.0.0.5",
	//   "bootstrap_port": 8998,
	//   "bootstrap_room": 1513209474796486656
	// }
}
