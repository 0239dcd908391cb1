// SPDX-License-Identifier: Apache-2.0

package names_test

import (
	"encoding/json"
	"fmt"

	_ "github.com/pdkit/pdkit/connector/all"
	"github.com/pdkit/pdkit/connector/names"
)

// What an engine's own configuration calls LMCacheConnectorV1 is one of two protocols.
func Example() {
	fmt.Println(names.Resolve("LMCacheConnectorV1", nil))
	fmt.Println(names.Resolve("LMCacheConnectorV1", json.RawMessage(`{"enable_pd":true}`)))
	// Output:
	// lmcache
	// lmcache-pd
}
