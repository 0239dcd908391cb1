// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

func TestMoRIIO(t *testing.T) {
	p := engine(t, "http://10.0.0.5:8100", discovery.RolePrefill, "tpSize", "8", "dpSize", "2")
	d := engine(t, "http://10.0.0.6:8200", discovery.RoleDecode, "handshakePort", "6302")
	other := engine(t, "http://10.0.0.7:8200", discovery.RoleDecode)
	engines := []discovery.Endpoint{p, other, d, d}

	out, err := open(t, "moriio", ``).Render(launch.Target{Endpoint: p, Engines: engines})
	require.NoError(t, err)
	assert.JSONEq(t, `{"kv_connector":"MoRIIOConnector","kv_role":"kv_producer",`+
		`"kv_connector_extra_config":{"proxy_ip":"","proxy_ping_port":0,"http_port":8100,"handshake_port":6301,`+
		`"notify_port":61005,"read_mode":false,"host_ip":"10.0.0.5","defer_timeout":60}}`, out.KVTransfer.JSON())
	assert.Equal(
		t, []string{"--enable-prompt-tokens-details", "--tensor-parallel-size", "8", "--data-parallel-size", "2"},
		out.Args,
	)

	out, err = open(t, "moriio", `{"mode":"read"}`).
		Render(
			launch.Target{Endpoint: d, Engines: engines, Gateway: "10.0.0.1",
				Version: launch.Version{Major: 0, Minor: 27}},
		)
	require.NoError(t, err)
	assert.JSONEq(t, `{"kv_connector":"MoRIIOConnector","kv_role":"kv_consumer",`+
		`"kv_connector_extra_config":{"proxy_ip":"10.0.0.1","proxy_ping_port":36367,"http_port":8200,`+
		`"handshake_port":6302,"notify_port":61005,"read_mode":true,"host_ip":"10.0.0.6","defer_timeout":60}}`,
		out.KVTransfer.JSON())

	out, err = open(t, "moriio", ``).Render(
		launch.Target{Endpoint: engine(t, "http://10.0.0.8:8300", discovery.RoleBoth),
			Resources: config.Resources{MaxDisk: "1Gi"}, CPU: true},
	)
	require.NoError(t, err)
	assert.Nil(t, out.KVTransfer, "with the connector it would serve nobody alone")
	assert.Equal(t, []string{"resources.maxDisk"}, idle(out))
}
