// SPDX-License-Identifier: Apache-2.0

// Package ascendengine has what vllm-ascend's two Mooncake connectors have in common.
//
// Facts: vllm-ascend at 182b75e (2026-08-22): docs/source/tutorials/features/pd_disaggregation_mooncake_multi_node.md,
// and mooncake_connector.py (_get_prefill_decode_size, which asserts both sizes of both roles; side_channel_port);
// before 0.11 examples/disaggregated_prefill_v1/mooncake_connector_deployment_guide.md.
package ascendengine

import (
	"strconv"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

// The attributes of an engine that launch settings need.
const (
	AttrKVPort = "kvPort" // the first of the engine's kv ports; each rank has one
	AttrTPSize = attr.TPSize
	AttrDPSize = "dpSize"
)

// FailureStop is the stop_reason with which D ends a response under recompute_scheduler_enable that it gives up.
const FailureStop = "recomputed"

const maxSize = 1 << 12

// CheckEndpoint checks the attributes of this package.
func CheckEndpoint(e discovery.Endpoint) error {
	for _, a := range []struct {
		name string
		high int
	}{{AttrKVPort, 65535}, {AttrTPSize, maxSize}, {AttrDPSize, maxSize}} {
		if _, err := attr.Int(e, a.name, 1, 1, a.high); err != nil {
			return &config.FieldError{Path: "attributes." + a.name,
				Problem: "is not a number from 1 to " + strconv.Itoa(a.high),
				Remedy:  "only launch settings need it; remove it where they are not rendered"}
		}
	}
	return nil
}

// TPRule is the rule for the tensor-parallel sizes of a pair: P's is a multiple of D's. One setting holds the sizes of
// both roles, so all engines of a role have the same size
// (docs/source/developer_guide/Design_Documents/disaggregated_prefill.md, Limitations).
func TPRule() attr.PairRule { return attr.PrefillMultiple(AttrTPSize) }
