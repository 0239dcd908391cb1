// SPDX-License-Identifier: Apache-2.0

package silentstore_test

import (
	"fmt"
	"log"

	"github.com/pdkit/pdkit/connector/silentstore"
)

// The requests need nothing: D finds by itself what P has put into the store, so the order of the legs is all that
// pdkit sees to.
func ExampleNew() {
	c, err := silentstore.New("ascend-store", nil)
	if err != nil {
		log.Fatal(err)
	}
	t := c.Traits()
	fmt.Println(t.Name, t.Order, t.Handoff.ContentStore)
	// Output: ascend-store prefill-then-decode true
}
