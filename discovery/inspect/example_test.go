// SPDX-License-Identifier: Apache-2.0

package inspect_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/discovery/static"
)

// The list knows an engine's address only; its model and version are asked of the engine.
func ExampleWrap() {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/v1/models":
			fmt.Fprint(w, `{"object":"list","data":[{"id":"tiny","object":"model","parent":null}]}`)
		case "/version":
			fmt.Fprint(w, `{"version":"0.32.0"}`)
		default:
			http.NotFound(w, r)
		}
	}))
	defer engine.Close()

	e, err := discovery.New(engine.URL, discovery.RoleDecode)
	if err != nil {
		log.Fatal(err)
	}
	listed, err := static.New(e)
	if err != nil {
		log.Fatal(err)
	}
	set := discovery.NewSet(inspect.Wrap(listed, nil))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); set.Run(ctx) }()

	err = set.WaitReady(ctx, func(s *discovery.Snapshot) bool {
		return len(s.Endpoints) == 1 && s.Endpoints[0].Version != ""
	})
	if err != nil {
		log.Fatal(err)
	}
	known := set.Load().Endpoints[0]
	fmt.Println(known.Model, known.Version)
	cancel()
	<-done
	// Output:
	// tiny 0.32.0
}
