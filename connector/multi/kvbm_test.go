// SPDX-License-Identifier: Apache-2.0

package multi_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// vllm-ascend's documentation has MooncakeConnectorV1 bring the KV and AscendStoreConnector keep prefixes beside it.
func TestAscendsStoreBesideItsTransfer(t *testing.T) {
	for _, class := range []string{"AscendStoreConnector", "MooncakeConnectorStoreV1"} {
		c := open(t, `{"connectors":[{"kv_connector":"MooncakeConnectorV1","kv_role":"kv_producer","kv_port":"20001",`+
			`"kv_connector_extra_config":{"prefill":{"dp_size":1,"tp_size":8},"decode":{"dp_size":1,"tp_size":8}}},`+
			`{"kv_connector":"`+class+`","kv_role":"kv_producer",`+
			`"kv_connector_extra_config":{"backend":"mooncake","lookup_rpc_port":"0"}}]}`)
		assert.Equal(t, "kv_transfer_params", c.Traits().Handoff.Member)
		assert.True(t, c.Traits().Ending.EndsByLength)
	}
}

// A tier of an engine's own memory is a child only as the engine writes it.
func TestATierIsNamedAsTheEngineNamesIt(t *testing.T) {
	_, err := tryOpen(`{"connectors":[{"type":"HiSparseConnector"},{"type":"nixl"}]}`)
	require.ErrorContains(t, err, "write the child as the engine does: {kv_connector: HiSparseConnector")
}
