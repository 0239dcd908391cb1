// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/discovery"
)

func TestSilentStores(t *testing.T) {
	rendered := func(name, settings string, role discovery.Role) launch.Settings {
		return render(t, name, settings, launch.Target{Endpoint: engine(t, "http://10.0.0.5:8100", role)})
	}
	out := rendered("ascend-store", `{"kv_connector_extra_config":{"backend":"memcache"}}`, discovery.RolePrefill)
	assert.JSONEq(t, `{"kv_connector":"AscendStoreConnector","kv_role":"kv_producer",`+
		`"kv_connector_extra_config":{"backend":"memcache"}}`, out.KVTransfer.JSON())
	assert.Equal(t, []launch.EnvVar{{Name: "PYTHONHASHSEED", Value: "0"}}, out.Env)
	out = rendered("ascend-store", `{"kv_connector":"MooncakeConnectorStoreV1"}`, discovery.RoleDecode)
	assert.JSONEq(t, `{"kv_connector":"MooncakeConnectorStoreV1","kv_role":"kv_consumer",`+
		`"kv_connector_extra_config":{"consumer_is_to_load":true}}`, out.KVTransfer.JSON(), "or D loads nothing")
	out = rendered("ascend-store", `{"kv_connector_extra_config":{"consumer_is_to_load":false}}`, discovery.RoleDecode)
	assert.Contains(t, out.KVTransfer.JSON(), `"consumer_is_to_load":false`, "what the settings say holds")
	for _, role := range []discovery.Role{discovery.RolePrefill, discovery.RoleDecode, discovery.RoleBoth} {
		assert.JSONEq(t, `{"kv_connector":"FlexKVConnectorV1","kv_role":"kv_both"}`,
			rendered("flexkv", ``, role).KVTransfer.JSON())
	}
	assert.Equal(t, "hf3fs-metadata", rendered("hf3fs", ``, discovery.RolePrefill).Companions[0].Name)
}
