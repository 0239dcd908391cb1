// SPDX-License-Identifier: Apache-2.0

package nixlengine

import (
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/launch"
)

// resources notes that NIXL has none of the limits in a Spec's resources: it moves blocks between the engines' own
// memories and keeps none.
func resources(r config.Resources) []launch.Note {
	var notes []launch.Note
	for _, limit := range []struct {
		path, text string
		value      config.Quantity
	}{
		{"resources.maxMemory", "NIXL keeps no KV of its own: it lies in the engine's KV cache, " +
			"which --kv-cache-memory-bytes or --gpu-memory-utilization bounds", r.MaxMemory},
		{"resources.maxDisk", "NIXL writes nothing to disk", r.MaxDisk},
		{"resources.maxBandwidth", "neither vLLM nor UCX bounds the bandwidth of a transfer", r.MaxBandwidth},
	} {
		if limit.value != "" {
			notes = append(notes, launch.Note{NoEffect: true, Path: limit.path, Text: limit.text})
		}
	}
	return notes
}
