// SPDX-License-Identifier: Apache-2.0

package attr_test

import (
	"fmt"

	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

// The prefill engines of this connector announce a port, and its engines split whole heads.
func Example() {
	rules := []attr.PairRule{attr.Multiple(attr.TPSize), attr.Same(attr.KVCacheDtype)}
	fmt.Println(rules[0].Compatible("2", "8"), rules[0].Compatible("2", "3"))

	engine := discovery.Endpoint{ID: "p-1", Attributes: map[string]string{"kvPort": "70000"}}
	_, err := attr.Port(engine, "kvPort", 0)
	fmt.Println(err)
	fmt.Println(attr.Faults(err, map[string]string{"kvPort": "the engine's --kv-port"}))
	// Output:
	// true false
	// endpoint p-1: attribute kvPort is not a number from 1 to 65535
	// attributes.kvPort: is not a number from 1 to 65535; the engine's --kv-port
}
