// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// A probe of Kubernetes asks whether this replica is to get requests.
func ExampleMux_Ready() {
	conn, err := nixl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	set := discovery.NewSet() // of no source: it never knows an engine
	flow, err := pdflow.New(conn, pick.New(set, pick.RoundRobin()))
	if err != nil {
		log.Fatal(err)
	}
	defer flow.Shutdown(context.Background())
	mux, err := pdflow.NewMux()
	if err != nil {
		log.Fatal(err)
	}
	if err := mux.SetRoutes(map[string]pdflow.Server{"tiny": flow}); err != nil {
		log.Fatal(err)
	}
	readyz := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := mux.Ready(r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	w := httptest.NewRecorder()
	readyz.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
	fmt.Print(w.Code, " ", w.Body)
	// Output:
	// 503 model "tiny": pdflow: no_endpoint (pick): the engines are not known yet
}

// One flow, and what is the matter with it.
func ExampleFlow_Ready() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	fmt.Println(flow.Ready(context.Background()))
	flow.Shutdown(context.Background())
	fmt.Println(errors.Is(flow.Ready(context.Background()), pdflow.CodeDraining))
	// Output:
	// <nil>
	// true
}
