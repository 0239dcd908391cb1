// SPDX-License-Identifier: Apache-2.0

package multi

import (
	"context"
	"slices"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/launch"
)

// silentClasses are vLLM's connectors that need nothing in the requests and do nothing between engines that a gateway
// must know: tiers of an engine's own memory, and stores in which engines find prompts by their tokens
// (vllm/distributed/kv_transfer/kv_connector/v1, 2026-08). They are common children of a MultiConnector. Only this
// package knows them.
var silentClasses = []string{"FlexKVConnectorV1", "HF3FSKVConnector", "HiSparseConnector", "SimpleCPUOffloadConnector"}

// isSilent reports whether a child needs nothing in the requests. OffloadingConnector needs nothing if it has no
// further tier, such as one of peers.
func (e *engineConfig) isSilent() bool {
	return slices.Contains(silentClasses, e.Connector) ||
		e.Connector == "OffloadingConnector" && e.Extra["secondary_tiers"] == nil
}

// silent is a child that needs nothing in the requests. Its launch settings are those of the engine's configuration.
type silent struct{ class string }

// Traits has the engine's class name, since pdkit has no connector for it. The child does not depend on the legs'
// order.
func (s silent) Traits() connector.Traits {
	return connector.Traits{Name: s.class, MultiUse: true, ContentStore: true}
}

// Prefill makes a prefill leg, in case no other child does.
func (silent) Prefill(_ context.Context, _ *connector.Session, leg *connector.Leg) error {
	leg.Normalize()
	leg.DropThinkingBudget()
	return nil
}

// Decode leaves the leg as it is.
func (silent) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

// Render adds nothing to the engine's own configuration.
func (s silent) Render(launch.Target) (launch.Settings, error) {
	return launch.Settings{Engine: "vllm", KVTransfer: &launch.KVTransfer{Connector: s.class, Role: "kv_both"}}, nil
}
