// SPDX-License-Identifier: Apache-2.0

package multi

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/launcher"
	"github.com/pdkit/pdkit/discovery"
)

// silentClasses are connectors that need nothing in the requests and do nothing between engines: tiers of an engine's
// own memory, which alone bring no KV from P to D (vLLM 0.33.0, vllm-ascend 0.26.0rc1, kvbm 1.6.1). They are common
// children of a MultiConnector. Only this package knows them.
var silentClasses = []string{kvbmTier, "HiSparseConnector", "RecomputeCPUOffloadConnector", "SimpleCPUOffloadConnector"}

// isSilent reports whether a child needs nothing in the requests. OffloadingConnector needs nothing if it has no
// further tier, such as one of peers.
func (e *EngineConfig) isSilent() bool {
	return slices.Contains(silentClasses, e.Connector) ||
		e.Connector == "OffloadingConnector" && e.Extra["secondary_tiers"] == nil
}

// silent is a child that needs nothing in the requests. Its launch settings are those of the engine's configuration.
type silent struct{ class string }

// Traits has the engine's class name, since pdkit has no connector for it. The child does not depend on the legs'
// order.
func (s silent) Traits() connector.Traits {
	return connector.Traits{Name: s.class, Handoff: connector.Handoff{MultiUse: true, ContentStore: true},
		Serving: connector.Serving{ReusedInUsage: true}}
}

// Prefill adds nothing.
func (silent) Prefill(context.Context, *connector.Session, *connector.Leg) error { return nil }

// Decode leaves the leg as it is.
func (silent) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

// LaunchSettings has nothing besides the engine's own configuration.
func (s silent) LaunchSettings(discovery.Endpoint) (launcher.Settings, error) {
	return launcher.Settings{
		KVTransfer: json.RawMessage(`{"kv_connector":` + string(connector.Quote(s.class)) + `,"kv_role":"kv_both"}`),
	}, nil
}
