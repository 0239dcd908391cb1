// SPDX-License-Identifier: Apache-2.0

package silentstore_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/connector/silentstore"
	"github.com/pdkit/pdkit/discovery"
)

// The requests need nothing; the engines do. Without consumer_is_to_load D would load nothing.
func ExampleNew() {
	c, err := silentstore.New("ascend-store", nil)
	if err != nil {
		log.Fatal(err)
	}
	for _, role := range []discovery.Role{discovery.RolePrefill, discovery.RoleDecode} {
		s, err := c.Render(launch.Target{Endpoint: discovery.Endpoint{Role: role}})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(role, s.KVTransfer.Role, s.KVTransfer.Extra)
	}
	// Output:
	// prefill kv_producer map[]
	// decode kv_consumer map[consumer_is_to_load:true]
}
