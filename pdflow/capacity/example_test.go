// SPDX-License-Identifier: Apache-2.0

package capacity_test

import (
	"fmt"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow/capacity"
)

func ExampleMeter() {
	d := discovery.Endpoint{ID: "d", Role: discovery.RoleDecode, Phase: discovery.PhaseReady}
	reading := func(string) (inspect.Reading, bool) { // of an inspect.Source
		return inspect.Reading{Load: inspect.Load{At: time.Now(), Running: 200, KVUsage: 0.95}}, true
	}
	meter := capacity.New(nil)
	decode := meter.Observe(time.Now(), []discovery.Endpoint{d}, reading)[discovery.RoleDecode]
	fmt.Println(decode.Engines, decode.Wanted, decode.Reason)
	// Output: 1 2 memory
}
