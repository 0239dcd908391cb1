// SPDX-License-Identifier: Apache-2.0

package sharedstorage_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/sharedstorage"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// The requests hold nothing about the folder: P writes into it, and D finds the KV by the prompt.
func ExampleNew() {
	c, err := sharedstorage.New(&sharedstorage.Options{})
	if err != nil {
		log.Fatal(err)
	}
	r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"Hello","max_tokens":8}`))
	if err != nil {
		log.Fatal(err)
	}
	s := contract.NewSession(r, "client-7", discovery.Endpoint{}, discovery.Endpoint{})
	show := func(name string, leg *connector.Leg, err error) {
		if err != nil {
			log.Fatal(err)
		}
		body, err := contract.Body(leg)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(name, string(body))
	}
	response := &connector.PrefillResult{Status: http.StatusOK, Body: []byte(`{}`), At: time.Now()}
	prefill := contract.NewPrefillLeg(r, c.Traits())
	show("P", prefill, c.Prefill(context.Background(), s, prefill))
	decode := contract.NewLeg(r)
	show("D", decode, c.Decode(context.Background(), s, response, decode))
	// Output:
	// P {"prompt":"Hello","max_tokens":1,"stream":false}
	// D {"prompt":"Hello","max_tokens":8}
}
