// SPDX-License-Identifier: Apache-2.0

package prompttokens_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/prompttokens"
)

// An engine tells which token ids the prompt of a request has. Those of the simulated engines are bytes.
func Example() {
	engine, err := enginesim.Start(enginesim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	entry, err := discovery.New(engine.URL(), discovery.RoleBoth)
	if err != nil {
		log.Fatal(err)
	}
	set, err := static.NewSet(entry)
	if err != nil {
		log.Fatal(err)
	}

	request, err := connector.ParseRequest(connector.APICompletions, []byte(`{"model":"tiny","prompt":"Hi!"}`))
	if err != nil {
		log.Fatal(err)
	}
	client := prompttokens.New(set, &prompttokens.Options{Timeout: 10 * time.Second})
	ids, exact, err := client.Tokens(context.Background(), request)
	fmt.Println(ids, exact, err)
	client.Close()
	// Output: [72 105 33] true <nil>
}
