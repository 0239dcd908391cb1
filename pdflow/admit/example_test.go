// SPDX-License-Identifier: Apache-2.0

package admit_test

import (
	"fmt"
	"log"
	"time"

	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/admit"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// A flow admits requests by its picker.
func ExampleNew() {
	conn, err := plainhttp.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	set := discovery.NewSet() // of the sources that find the engines
	picker, err := admit.New(pick.New(set, pick.TwoChoices()),
		&admit.Options{Adaptive: true, DecodeLimit: 128, QueueTimeout: 5 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer picker.Close()
	flow, err := pdflow.New(conn, picker)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(flow.Connector().Traits().Name, "admits, and", picker.Queued(), "requests wait")
	// Output: http admits, and 0 requests wait
}
