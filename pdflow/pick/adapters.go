// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"strings"
	"sync/atomic"

	"github.com/pdkit/pdkit/discovery"
)

// attrAdapters is the attribute of an endpoint with the LoRA adapters that it has loaded, separated by commas.
// discovery/inspect adds it.
const attrAdapters = "adapters"

// Adapters returns a function that reports whether an engine of the set has loaded an adapter, for
// [pdflow.WithAdapters]. It follows the set, and takes some nanoseconds.
func Adapters(set *discovery.Set) func(model string) bool {
	type adapters struct {
		snap   *discovery.Snapshot
		loaded map[string]bool
	}
	var latest atomic.Pointer[adapters]
	return func(model string) bool {
		snap, a := set.Load(), latest.Load()
		if a == nil || a.snap != snap {
			a = &adapters{snap: snap, loaded: map[string]bool{}}
			for i := range snap.Endpoints {
				for name := range strings.SplitSeq(snap.Endpoints[i].Attribute(attrAdapters), ",") {
					a.loaded[name] = true
				}
			}
			delete(a.loaded, "")
			latest.Store(a)
		}
		return a.loaded[model]
	}
}
