// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/sharedstorage"
)

// exampleSince is the release from which the class is called ExampleConnector (vllm#30201, 2025-12-08).
var exampleSince = Version{Minor: 13}

// storageSince is the first release with V1 connectors. This connector was the first of them.
var storageSince = Version{Minor: 8, Patch: 5}

// ownTmp is what a connector without a shared folder means, that of an encode stage too.
const ownTmp = "is not set: each engine uses its own /tmp, which is shared only between processes of one machine"

// renderSharedStorage gives both roles the same settings: kv_both and the shared folder, as in the recorded engines.
func renderSharedStorage(_ connector.KVConnector, o *sharedstorage.Options, t Target) (Settings, error) {
	if t.Version.Before(storageSince.Major, storageSince.Minor) {
		return Settings{}, refuse("version", "is older than this connector",
			"vLLM "+storageSince.String()+" or newer")
	}
	kv := &KVTransfer{Connector: "ExampleConnector", Role: "kv_both"}
	if t.Version.Before(exampleSince.Major, exampleSince.Minor) {
		kv.Connector = "SharedStorageConnector"
	}
	s := vllm(kv)
	if path := cmp.Or(o.SharedStoragePath, o.EngineStoragePath); path != "" {
		kv.Extra = map[string]any{"shared_storage_path": path}
		s.note("config.sharedStoragePath", "kv_connector_extra_config.shared_storage_path; every engine of the model "+
			"must see the same files there")
	} else {
		s.note("config.sharedStoragePath", ownTmp)
	}
	s.noteIf(o.CacheHitThreshold != nil, "config.cacheHitThreshold", "goes with each request; only engines with "+
		"vllm#24520 know it, which no release of vLLM has: others serve every request on D alone")
	s.noLimits(t.Resources, "the folder grows without a limit: nothing is evicted")
	return s, nil
}
