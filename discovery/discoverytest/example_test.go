// SPDX-License-Identifier: Apache-2.0

package discoverytest_test

import (
	"context"
	"fmt"
	"log"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/discovery/static"
)

// Whether a source keeps the rules of discovery.Source, asked by a program. A test calls Run.
func ExampleCheck() {
	e, err := discovery.New("http://10.0.0.5:8000", discovery.RolePrefill)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(discoverytest.Check(context.Background(), discoverytest.Harness{New: func() discovery.Source {
		source, err := static.New(e)
		if err != nil {
			log.Fatal(err)
		}
		return source
	}}))
	// Output:
	// <nil>
}

// A set over a source that the test drives: what it publishes is what a flow sees.
func ExampleManual() {
	e, err := discovery.New("http://10.0.0.5:8000", discovery.RolePrefill)
	if err != nil {
		log.Fatal(err)
	}
	source := discoverytest.NewManual()
	set := discovery.NewSet(source)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); set.Run(ctx) }()

	source.Publish(e)
	if err := set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return len(s.Endpoints) == 1 }); err != nil {
		log.Fatal(err)
	}
	fmt.Println(set.Load().Endpoints[0].ID)
	cancel()
	<-done
	// Output:
	// 10.0.0.5:8000
}
