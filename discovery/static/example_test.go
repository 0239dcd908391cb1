// SPDX-License-Identifier: Apache-2.0

package static_test

import (
	"context"
	"fmt"
	"log"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
)

// Engines that are known when the program starts.
func ExampleNew() {
	p, err := discovery.New("http://10.0.0.5:8000", discovery.RolePrefill)
	if err != nil {
		log.Fatal(err)
	}
	d, err := discovery.New("http://10.0.0.6:8000", discovery.RoleDecode)
	if err != nil {
		log.Fatal(err)
	}
	p.Group, d.Group = "a", "a" // only P and D of the same group form a pair
	source, err := static.New(p, d)
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	err = source.Watch(ctx, func(s discovery.Snapshot) { // a discovery.Set does this for a flow
		for _, e := range s.Endpoints {
			fmt.Println(e.ID, e.Role, e.Group)
		}
		cancel()
	})
	fmt.Println("ended with its context:", err == nil || ctx.Err() != nil)
	// Output:
	// 10.0.0.5:8000 prefill a
	// 10.0.0.6:8000 decode a
	// ended with its context: true
}
