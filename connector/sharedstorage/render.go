// SPDX-License-Identifier: Apache-2.0

package sharedstorage

import (
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/launch"
)

// renamed is the release from which the class is called ExampleConnector (vllm#30201, 2025-12-08).
var renamed = launch.Version{Major: 0, Minor: 13}

// first is the first release with V1 connectors. This connector was the first of them.
var first = launch.Version{Major: 0, Minor: 8, Patch: 5}

// Render gives both roles the same settings: kv_both and the shared folder, as in the recorded engines.
func (c *Connector) Render(t launch.Target) (launch.Settings, error) {
	if t.Version.Before(first.Major, first.Minor) {
		return launch.Settings{},
			&config.FieldError{Path: "version", Problem: "is older than this connector",
				Remedy: "vLLM " + first.String() + " or newer"}
	}
	kv := &launch.KVTransfer{Connector: "ExampleConnector", Role: "kv_both"}
	if t.Version.Before(renamed.Major, renamed.Minor) {
		kv.Connector = "SharedStorageConnector"
	}
	s := launch.Settings{Engine: "vllm", KVTransfer: kv, Args: []string{"--enable-prompt-tokens-details"}}
	if c.path != "" {
		kv.Extra = map[string]any{"shared_storage_path": c.path}
		s.Notes = append(s.Notes,
			launch.Note{Path: "config.sharedStoragePath",
				Text: "kv_connector_extra_config.shared_storage_path; every engine of the model must see the same " +
					"files there"})
	} else {
		s.Notes = append(s.Notes,
			launch.Note{Path: "config.sharedStoragePath",
				Text: "is not set: each engine uses its own /tmp, which is shared only between processes of " +
					"one machine"})
	}
	if c.threshold != nil {
		s.Notes = append(s.Notes,
			launch.Note{Path: "config.cacheHitThreshold",
				Text: "goes with each request; only engines with vllm#24520 know it, which no release of vLLM has: " +
					"others serve every request on D alone"})
	}
	s.Notes = append(s.Notes, launch.NoLimits(t.Resources, "the folder grows without a limit: nothing is evicted")...)
	return s, nil
}
