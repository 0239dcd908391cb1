// SPDX-License-Identifier: Apache-2.0

package health_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow/health"
)

// An engine that fails its probes is not ready for requests; the list itself stays.
func ExampleNew() {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	defer engine.Close()
	e, err := discovery.New(engine.URL, discovery.RolePrefill)
	if err != nil {
		log.Fatal(err)
	}
	set, err := static.NewSet(e)
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)

	prober := health.New(set, &health.Options{Interval: 10 * time.Millisecond})
	go func() { done <- prober.Run(ctx) }()

	err = set.WaitReady(ctx, func(s *discovery.Snapshot) bool {
		return len(s.Endpoints) == 1 && s.Endpoints[0].Phase == discovery.PhaseNotReady
	})
	fmt.Println("known, and not ready:", err == nil)
	cancel()
	<-done
	// Output:
	// known, and not ready: true
}
