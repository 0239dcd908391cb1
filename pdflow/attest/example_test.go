// SPDX-License-Identifier: Apache-2.0

package attest_test

import (
	"fmt"

	"github.com/pdkit/pdkit/pdflow/attest"
)

// The estimator says which pair to probe next, and names d2 when the results leave no other explanation.
func ExampleEstimator() {
	e := attest.NewEstimator(attest.EstimatorOptions{})
	e.SetFleet([]string{"p1", "p2", "p3"}, []string{"d1", "d2", "d3"}, nil)
	for {
		prefill, decode, _ := e.Next()
		named, _ := e.Record(prefill, decode, decode != "d2")
		if len(named) > 0 {
			fmt.Println(named[0].Suspect)
			return
		}
	}
	// Output: decode d2
}
