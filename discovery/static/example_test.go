// SPDX-License-Identifier: Apache-2.0

package static_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
)

// Engines that are known when the program starts.
func ExampleNewSet() {
	p, err := discovery.New("http://10.0.0.5:8000", discovery.RolePrefill)
	if err != nil {
		log.Fatal(err)
	}
	d, err := discovery.New("http://10.0.0.6:8000", discovery.RoleDecode)
	if err != nil {
		log.Fatal(err)
	}
	p.Group, d.Group = "a", "a" // only P and D of the same group form a pair
	set, err := static.NewSet(p, d)
	if err != nil {
		log.Fatal(err)
	}
	for _, e := range set.Load().Endpoints {
		fmt.Println(e.ID, e.Role, e.Group)
	}
	// Output:
	// 10.0.0.5:8000 prefill a
	// 10.0.0.6:8000 decode a
}
