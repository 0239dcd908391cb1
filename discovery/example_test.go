// SPDX-License-Identifier: Apache-2.0

package discovery_test

import (
	"context"
	"fmt"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
)

// A set of two engines that never change, waited for and read.
func ExampleSet() {
	prefill, err := discovery.New("http://10.0.0.1:8100", discovery.RolePrefill)
	if err != nil {
		fmt.Println(err)
		return
	}
	decode, err := discovery.New("http://10.0.0.2:8200", discovery.RoleDecode)
	if err != nil {
		fmt.Println(err)
		return
	}
	source, err := static.New(prefill, decode)
	if err != nil {
		fmt.Println(err)
		return
	}

	set := discovery.NewSet(source)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	done := make(chan error)
	go func() { done <- set.Run(ctx) }()

	if err := set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return len(s.Endpoints) > 0 }); err != nil {
		fmt.Println(err)
	}
	set.SetHealthy("10.0.0.1:8100", false)
	for _, e := range set.Load().Endpoints {
		fmt.Println(e.ID, e.Role, e.Phase)
	}
	cancel()
	<-done
	// Output:
	// 10.0.0.1:8100 prefill not-ready
	// 10.0.0.2:8200 decode ready
}
