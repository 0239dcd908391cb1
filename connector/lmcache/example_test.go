// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/lmcache"
	"github.com/pdkit/pdkit/discovery"
)

// The requests hold nothing about the store: P fills it, and D finds the chunks by the prompt.
func ExampleNew() {
	c, err := lmcache.New(&lmcache.Options{})
	if err != nil {
		log.Fatal(err)
	}
	r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"Hello","max_tokens":8}`))
	if err != nil {
		log.Fatal(err)
	}
	s := connector.NewSession(r, "client-7", discovery.Endpoint{}, discovery.Endpoint{})
	show := func(name string, leg *connector.Leg, err error) {
		if err != nil {
			log.Fatal(err)
		}
		body, err := leg.Body()
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(name, string(body))
	}
	response := connector.NewPrefillResult(http.StatusOK, nil, []byte(`{}`), time.Now())
	prefill := connector.NewPrefillLeg(r, c.Traits())
	show("P", prefill, c.Prefill(context.Background(), s, prefill))
	decode := connector.NewLeg(r)
	show("D", decode, c.Decode(context.Background(), s, response, decode))
	// Output:
	// P {"prompt":"Hello","max_tokens":1,"stream":false}
	// D {"prompt":"Hello","max_tokens":8}
}
