// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/ascendlayerwise"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/discovery"
)

func TestLaunchSettings(t *testing.T) {
	endpoint := func(url string, role discovery.Role, attributes map[string]string) discovery.Endpoint {
		e, err := discovery.New(url, role)
		require.NoError(t, err)
		e.Attributes = attributes
		return e
	}
	p := endpoint("http://10.0.0.5:8100", discovery.RolePrefill, map[string]string{"tpSize": "8"})
	d := endpoint("http://10.0.0.6:8200", discovery.RoleDecode, map[string]string{"tpSize": "4"})
	engines := []discovery.Endpoint{p, d}
	c, err := ascendlayerwise.New(&ascendlayerwise.Options{KVPort: 36000})
	require.NoError(t, err)

	out, err := c.Render(launch.Target{Endpoint: p, Engines: engines})
	require.NoError(t, err)
	assert.JSONEq(t, `{"kv_connector":"MooncakeLayerwiseConnector","kv_role":"kv_producer","kv_port":36000,`+
		`"kv_connector_extra_config":{"prefill":{"dp_size":1,"tp_size":8},"decode":{"dp_size":1,"tp_size":4}}}`,
		out.KVTransfer.JSON())
	out, err = c.Render(launch.Target{Endpoint: d, Engines: engines})
	require.NoError(t, err)
	assert.JSONEq(t, `{"kv_connector":"MooncakeLayerwiseConnector","kv_role":"kv_consumer","kv_port":36100,`+
		`"kv_connector_extra_config":{"prefill":{"dp_size":1,"tp_size":8},"decode":{"dp_size":1,"tp_size":4}}}`,
		out.KVTransfer.JSON())
	var warned bool
	for _, n := range out.Notes {
		warned = warned || n.Path == "config.callbackURL" && strings.Contains(n.Text, "loopback")
	}
	assert.True(t, warned, "D on another host cannot reach 127.0.0.1")

	_, err = c.Render(launch.Target{Endpoint: endpoint("http://10.0.0.7:8300", discovery.RoleBoth, nil)})
	require.ErrorContains(t, err, "either sends or receives", "it would be paired, and P would push nothing")
	faults := config.FieldErrors(
		c.CheckEndpoint(endpoint("http://d:1", discovery.RoleDecode, map[string]string{"kvPort": "x"})),
	)
	require.Len(t, faults, 1)
	assert.Equal(t, "attributes.kvPort", faults[0].Path)
}
