// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/discovery"
)

func TestRelayAndTPU(t *testing.T) {
	target := func(role discovery.Role) launch.Target {
		return launch.Target{Endpoint: engine(t, "http://10.0.0.5:8100", role)}
	}
	out, err := open(t, "tpu", `{"leaseDuration":"90s"}`).Render(target(discovery.RolePrefill))
	require.NoError(t, err)
	assert.JSONEq(t, `{"kv_connector":"TPUConnector","kv_role":"kv_producer",`+
		`"kv_connector_module_path":"tpu_inference.distributed.tpu_connector"}`, out.KVTransfer.JSON())
	assert.Equal(t, []launch.EnvVar{{Name: "TPU_KV_TRANSFER_PORT", Value: "9100"},
		{Name: "TPU_SIDE_CHANNEL_PORT", Value: "9600"}, {Name: "TPU_P2P_WAIT_PULL_TIMEOUT", Value: "90"}}, out.Env)
	_, err = open(t, "tpu", ``).Render(target(discovery.RoleBoth))
	require.ErrorContains(t, err, "either sends or receives")
	_, err = open(t, "relay", ``).Render(target(discovery.RolePrefill))
	require.ErrorContains(t, err, "kv_connector")
	out, err = open(t, "relay", `{"kv_connector":"HouseConnector","kv_connector_extra_config":{"port":7000}}`).
		Render(target(discovery.RoleDecode))
	require.NoError(t, err)
	assert.JSONEq(t, `{"kv_connector":"HouseConnector","kv_role":"kv_consumer",`+
		`"kv_connector_extra_config":{"port":7000}}`, out.KVTransfer.JSON())
}
