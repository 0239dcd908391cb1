// SPDX-License-Identifier: Apache-2.0

package multi

import (
	"context"
	"slices"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/launch"
)

// silentClasses are vLLM's connectors that need nothing on the wire and do nothing between engines that a gateway must know of: tiers of an
// engine's own memory, and stores in which engines find prompts by their tokens (vllm/distributed/kv_transfer/kv_connector/v1, 2026-08).
// They are common children of MultiConnector, and only known here.
var silentClasses = []string{"FlexKVConnectorV1", "HF3FSKVConnector", "HiSparseConnector", "SimpleCPUOffloadConnector"}

// isSilent knows a child that needs nothing. OffloadingConnector is one as long as no further tier is set, such as that of peers.
func (e *engineConfig) isSilent() bool {
	return slices.Contains(silentClasses, e.Connector) || e.Connector == "OffloadingConnector" && e.Extra["secondary_tiers"] == nil
}

// silent is such a child. What it is launched with is what the engine's configuration says, and nothing else.
type silent struct{ class string }

// Traits have the engine's class name, since no connector of pdkit's stands for it. Nothing of it depends on the legs.
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
