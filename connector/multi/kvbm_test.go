// SPDX-License-Identifier: Apache-2.0

package multi_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/connector/multi"
	"github.com/pdkit/pdkit/discovery"
)

func target(t *testing.T, role discovery.Role) launch.Target {
	t.Helper()
	e, err := discovery.New("http://10.0.0.2:8200", role)
	require.NoError(t, err)
	return launch.Target{Endpoint: e}
}

// PdConnector asks only its first child what it can load, so that D must run NIXL alone.
func TestOnlyPRunsPdConnector(t *testing.T) {
	c, err := kvbmFactory(nil)
	require.NoError(t, err)
	assert.Equal(t, multi.KVBMName, c.Traits().Name)
	r := c.(launch.Renderer)
	p, err := r.Render(target(t, discovery.RolePrefill))
	require.NoError(t, err)
	assert.Equal(t, "PdConnector", p.KVTransfer.Connector)
	assert.Equal(t, "kvbm.vllm_integration.connector", p.KVTransfer.ModulePath)
	assert.Equal(t, "kv_both", p.KVTransfer.Role)
	assert.Contains(t, p.KVTransfer.JSON(), `"connectors":[{"kv_connector":"DynamoConnector",`+
		`"kv_connector_module_path":"kvbm.vllm_integration.connector","kv_role":"kv_both"},`+
		`{"kv_connector":"NixlConnector"`)
	d, err := r.Render(target(t, discovery.RoleDecode))
	require.NoError(t, err)
	assert.Equal(t, "NixlConnector", d.KVTransfer.Connector)
	assert.NotContains(t, d.KVTransfer.JSON(), "DynamoConnector")
	assert.NotEmpty(t, d.Env, "NIXL's side channel")
	_, err = r.Render(target(t, discovery.RoleBoth))
	require.ErrorContains(t, err, "never loads another engine's KV")
}

// vllm-ascend's documentation has MooncakeConnectorV1 bring the KV and AscendStoreConnector keep prefixes beside it.
func TestAscendsStoreBesideItsTransfer(t *testing.T) {
	for _, class := range []string{"AscendStoreConnector", "MooncakeConnectorStoreV1"} {
		c := open(t, `{"connectors":[{"kv_connector":"MooncakeConnectorV1","kv_role":"kv_producer","kv_port":"20001",`+
			`"kv_connector_extra_config":{"prefill":{"dp_size":1,"tp_size":8},"decode":{"dp_size":1,"tp_size":8}}},`+
			`{"kv_connector":"`+class+`","kv_role":"kv_producer",`+
			`"kv_connector_extra_config":{"backend":"mooncake","lookup_rpc_port":"0"}}]}`)
		assert.Equal(t, "kv_transfer_params", c.Traits().Handoff.Member)
		assert.True(t, c.Traits().Ending.EndsByLength)
		out, err := c.(launch.Renderer).Render(target(t, discovery.RolePrefill))
		require.NoError(t, err)
		assert.JSONEq(t, `{"kv_connector":"MultiConnector","kv_role":"kv_producer","kv_connector_extra_config":{`+
			`"connectors":[{"kv_connector":"MooncakeConnectorV1","kv_role":"kv_producer","kv_port":20001,`+
			`"kv_connector_extra_config":{"prefill":{"dp_size":1,"tp_size":8},"decode":{"dp_size":1,"tp_size":8}}},`+
			`{"kv_connector":"`+class+`","kv_role":"kv_producer",`+
			`"kv_connector_extra_config":{"backend":"mooncake","lookup_rpc_port":"0"}}]}}`, out.KVTransfer.JSON())
	}
}

// A tier of an engine's own memory is a child only as the engine writes it.
func TestATierIsNamedAsTheEngineNamesIt(t *testing.T) {
	_, err := tryOpen(`{"connectors":[{"type":"HiSparseConnector"},{"type":"nixl"}]}`)
	require.ErrorContains(t, err, "write the child as the engine does: {kv_connector: HiSparseConnector")
}
