// SPDX-License-Identifier: Apache-2.0

package all

import (
	"github.com/pdkit/pdkit/connector/names"
)

// refused are the classes of vLLM 0.33.0's and vllm-ascend 0.26.0rc1's KV connectors that no connector can serve, with
// the reason. Those that keep KV in an engine's own memory can be children of a multi connector.
var refused = map[string]string{
	"DecodeBenchConnector": "fills the KV cache with made-up values, to measure decode without a prefill: its " +
		"texts mean nothing",
	"ExampleHiddenStatesConnector": "writes hidden states to files and transfers no KV",
	"HiSparseConnector":            ownMemory,
	"RecomputeCPUOffloadConnector": ownMemory,
	"SimpleCPUOffloadConnector":    ownMemory,
	"SfaRemoteD2HConnector": "asks for P by a callback that names no blocks; ascend-layerwise serves the callbacks " +
		"of MooncakeLayerwiseConnector alone",
}

const ownMemory = "keeps KV in the engine's own memory, and brings none from P to D: it can stand beside a transfer " +
	"in the list of a multi connector"

func init() {
	for class, why := range refused {
		names.Refuse(class, why)
	}
}
