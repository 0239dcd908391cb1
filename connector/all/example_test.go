// SPDX-License-Identifier: Apache-2.0

package all_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	_ "github.com/pdkit/pdkit/connector/all"
)

// With all connectors registered, a configuration chooses one by pdkit's name or by the engine's.
func Example() {
	for _, settings := range []string{`{"type":"nixl"}`, `{"type":"MooncakeConnector"}`, `{"type":"SGLang"}`} {
		spec, err := config.ParseSpec([]byte(settings))
		if err != nil {
			log.Fatal(err)
		}
		c, err := connector.Open(spec)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(c.Traits().Name, c.Traits().Order)
	}
	// Output:
	// nixl prefill-then-decode
	// mooncake together
	// sglang together
}
