// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

func second(t *testing.T, role discovery.Role) launch.Target {
	t.Helper()
	return launch.Target{Endpoint: engine(t, "http://10.0.0.2:8200", role)}
}

// Two children that need different values of one variable cannot run in one engine. If they need the same value, the
// engine gets it once.
func TestAVariableHasOneValueForAllChildren(t *testing.T) {
	e := engine(t, "http://10.0.0.2:8200", discovery.RoleDecode, "receiverInitPorts", "8300", "receiverAllocPorts",
		"8400")
	_, err := open(t, "multi", `{"connectors":[{"type":"nixl","config":{"protocol":"rdma"}},{"type":"lmcache-pd"}]}`).
		Render(launch.Target{Endpoint: e})
	require.ErrorContains(t, err, "connectors[1]: wants another value of UCX_TLS than a connector before it")

	s := render(t, "multi", `{"connectors":[{"type":"nixl"},{"type":"lmcache-pd"}]}`, launch.Target{Endpoint: e})
	seeds := 0
	for _, v := range s.Env {
		if v.Name == "PYTHONHASHSEED" {
			seeds++
		}
	}
	assert.Equal(t, 1, seeds)
}

// PdConnector asks only its first child what it can load, so that D must run NIXL alone.
func TestOnlyPRunsPdConnector(t *testing.T) {
	r := open(t, "kvbm", ``)
	p, err := r.Render(second(t, discovery.RolePrefill))
	require.NoError(t, err)
	assert.Equal(t, "PdConnector", p.KVTransfer.Connector)
	assert.Equal(t, "kvbm.vllm_integration.connector", p.KVTransfer.ModulePath)
	assert.Equal(t, "kv_both", p.KVTransfer.Role)
	assert.Contains(t, p.KVTransfer.JSON(), `"connectors":[{"kv_connector":"DynamoConnector",`+
		`"kv_connector_module_path":"kvbm.vllm_integration.connector","kv_role":"kv_both"},`+
		`{"kv_connector":"NixlConnector"`)
	d, err := r.Render(second(t, discovery.RoleDecode))
	require.NoError(t, err)
	assert.Equal(t, "NixlConnector", d.KVTransfer.Connector)
	assert.NotContains(t, d.KVTransfer.JSON(), "DynamoConnector")
	assert.NotEmpty(t, d.Env, "NIXL's side channel")
	_, err = r.Render(second(t, discovery.RoleBoth))
	require.ErrorContains(t, err, "never loads another engine's KV")
}

// vllm-ascend's documentation has MooncakeConnectorV1 bring the KV and AscendStoreConnector keep prefixes beside it.
func TestAscendsStoreBesideItsTransfer(t *testing.T) {
	for _, class := range []string{"AscendStoreConnector", "MooncakeConnectorStoreV1"} {
		c := open(t, "multi", `{"connectors":[{"kv_connector":"MooncakeConnectorV1","kv_role":"kv_producer",`+
			`"kv_port":"20001",`+
			`"kv_connector_extra_config":{"prefill":{"dp_size":1,"tp_size":8},"decode":{"dp_size":1,"tp_size":8}}},`+
			`{"kv_connector":"`+class+`","kv_role":"kv_producer",`+
			`"kv_connector_extra_config":{"backend":"mooncake","lookup_rpc_port":"0"}}]}`)
		out, err := c.Render(second(t, discovery.RolePrefill))
		require.NoError(t, err)
		assert.JSONEq(t, `{"kv_connector":"MultiConnector","kv_role":"kv_producer","kv_connector_extra_config":{`+
			`"connectors":[{"kv_connector":"MooncakeConnectorV1","kv_role":"kv_producer","kv_port":20001,`+
			`"kv_connector_extra_config":{"prefill":{"dp_size":1,"tp_size":8},"decode":{"dp_size":1,"tp_size":8}}},`+
			`{"kv_connector":"`+class+`","kv_role":"kv_producer",`+
			`"kv_connector_extra_config":{"backend":"mooncake","lookup_rpc_port":"0"}}]}}`, out.KVTransfer.JSON())
	}
}

func TestAnEnginesOwnSettingsAreTakenAsTheyStand(t *testing.T) {
	c := open(t, "multi", `{"connectors":[{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_port":"5",`+
		`"kv_load_failure_policy":"fail","kv_connector_extra_config":{"kv_lease_duration":300,`+
		`"some_new_setting":true}},{"type":"sharedstorage"}]}`)
	s, err := c.Render(launch.Target{Endpoint: discovery.Endpoint{Role: discovery.RoleDecode}})
	require.NoError(t, err)
	var kv struct {
		Connector string `json:"kv_connector"`
		Role      string `json:"kv_role"`
		Extra     struct {
			Connectors []struct {
				Connector string         `json:"kv_connector"`
				Role      string         `json:"kv_role"`
				Port      int            `json:"kv_port"`
				Policy    string         `json:"kv_load_failure_policy"`
				Extra     map[string]any `json:"kv_connector_extra_config"`
			} `json:"connectors"`
		} `json:"kv_connector_extra_config"`
	}
	require.NoError(t, json.Unmarshal([]byte(s.KVTransfer.JSON()), &kv))
	assert.Equal(t, "MultiConnector", kv.Connector)
	assert.Equal(t, "kv_both", kv.Role)
	require.Len(t, kv.Extra.Connectors, 2)
	first := kv.Extra.Connectors[0]
	assert.Equal(t, []any{"NixlConnector", "kv_both", 5, "fail", true, 300.0},
		[]any{first.Connector, first.Role, first.Port, first.Policy, first.Extra["some_new_setting"],
			first.Extra["kv_lease_duration"]})
	assert.Equal(t, "ExampleConnector", kv.Extra.Connectors[1].Connector)
	assert.Contains(t, s.Args, "--enable-prompt-tokens-details")
	var at []string
	for _, n := range s.Notes {
		at = append(at, n.Path)
	}
	assert.Contains(t, at, "config.connectors[1].config.sharedStoragePath")

	_, err = c.Render(
		launch.Target{Version: launch.Version{Minor: 1}, Endpoint: discovery.Endpoint{Role: discovery.RoleDecode}},
	)
	require.Error(t, err)
	assert.Contains(t, config.FieldErrors(err)[0].Path, "connectors[")
}

// The launch settings of a child that needs nothing in the requests are those of the engine's configuration.
func TestChildrenThatNeedNothingOnTheWireAreRendered(t *testing.T) {
	c := open(t, "multi", `{"connectors":[{"type":"nixl"},{"kv_connector":"OffloadingConnector","kv_role":"kv_both",`+
		`"kv_connector_extra_config":{"num_cpu_blocks":1000}},{"kv_connector":"HiSparseConnector"}]}`)
	settings, err := c.Render(launch.Target{Endpoint: discovery.Endpoint{Role: discovery.RolePrefill}})
	require.NoError(t, err)
	assert.Contains(t, settings.KVTransfer.JSON(), `{"kv_connector":"OffloadingConnector",`+
		`"kv_connector_extra_config":{"num_cpu_blocks":1000},"kv_role":"kv_both"},`+
		`{"kv_connector":"HiSparseConnector","kv_role":"kv_both"}`)
}

// This is the design documents' own example of a MultiConnector.
func TestTheDocumentsMultiConnector(t *testing.T) {
	c := open(t, "multi", `{"connectors":[{"kv_connector":"NixlConnector","kv_role":"kv_both"},`+
		`{"kv_connector":"SharedStorageConnector","kv_role":"kv_both",`+
		`"kv_connector_extra_config":{"shared_storage_path":"local_storage"}}]}`)
	s, err := c.Render(
		launch.Target{Version: launch.Version{Minor: 10}, Endpoint: discovery.Endpoint{Role: discovery.RolePrefill}},
	)
	require.NoError(t, err)
	assert.Contains(t, s.KVTransfer.JSON(), `{"kv_connector":"SharedStorageConnector",`+
		`"kv_connector_extra_config":{"shared_storage_path":"local_storage"},"kv_role":"kv_both"}`)
	s, err = c.Render(launch.Target{Endpoint: discovery.Endpoint{Role: discovery.RolePrefill}})
	require.NoError(t, err)
	assert.Contains(t, s.KVTransfer.JSON(), `"kv_connector":"ExampleConnector"`, "the class's name in newer engines")
}
