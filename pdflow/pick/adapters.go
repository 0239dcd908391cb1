// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"iter"
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
				for name := range adaptersOf(&snap.Endpoints[i]) {
					a.loaded[name] = true
				}
			}
			latest.Store(a)
		}
		return a.loaded[model]
	}
}

// adaptersOf returns the adapters that an endpoint has loaded.
func adaptersOf(e *discovery.Endpoint) iter.Seq[string] {
	return func(yield func(string) bool) {
		for name := range strings.SplitSeq(e.Attribute(attrAdapters), ",") {
			if name = strings.TrimSpace(name); name != "" && !yield(name) {
				return
			}
		}
	}
}
