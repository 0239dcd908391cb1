// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

func TestAscendLayerwise(t *testing.T) {
	p := engine(t, "http://10.0.0.5:8100", discovery.RolePrefill, "tpSize", "8")
	d := engine(t, "http://10.0.0.6:8200", discovery.RoleDecode, "tpSize", "4")
	engines := []discovery.Endpoint{p, d}
	c := open(t, "ascend-layerwise", `{"kvPort":36000}`)

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

	_, err = c.Render(launch.Target{Endpoint: engine(t, "http://10.0.0.7:8300", discovery.RoleBoth)})
	require.ErrorContains(t, err, "either sends or receives", "it would be paired, and P would push nothing")
}

func TestMooncakeHybridIsItsOwnClass(t *testing.T) {
	p := engine(t, "http://10.0.0.5:8100", discovery.RolePrefill)
	out := render(t, "mooncake-hybrid", ``, launch.Target{Endpoint: p, Engines: []discovery.Endpoint{p}})
	assert.Equal(t, "MooncakeHybridConnector", out.KVTransfer.Connector)
}

func TestMooncakeAscend(t *testing.T) {
	p := engine(t, "http://10.0.0.5:8100", discovery.RolePrefill, "tpSize", "8", "dpSize", "2")
	d := engine(t, "http://10.0.0.6:8200", discovery.RoleDecode, "dpSize", "16", "kvPort", "36200")
	engines := []discovery.Endpoint{p, d}
	c := open(t, "mooncake-ascend", `{"leaseDuration":"90s"}`)

	out, err := c.Render(launch.Target{Endpoint: p, Engines: engines})
	require.NoError(t, err)
	assert.JSONEq(t, `{"kv_connector":"MooncakeConnectorV1","kv_role":"kv_producer","kv_port":30000,`+
		`"kv_connector_extra_config":{"prefill":{"dp_size":2,"tp_size":8},"decode":{"dp_size":16,"tp_size":1}}}`,
		out.KVTransfer.JSON())
	assert.Equal(
		t, []string{"--enable-prompt-tokens-details", "--tensor-parallel-size", "8", "--data-parallel-size", "2"},
		out.Args,
	)
	assert.Equal(t, []launch.EnvVar{{Name: "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", Value: "90"}}, out.Env)

	out, err = c.Render(
		launch.Target{Endpoint: d, Engines: engines, Version: launch.Version{Major: 0, Minor: 10, Patch: 1}},
	)
	require.NoError(t, err)
	assert.JSONEq(t, `{"kv_connector":"MooncakeConnectorV1","kv_role":"kv_consumer","kv_port":36200,`+
		`"kv_buffer_device":"npu","kv_parallel_size":1,"kv_rank":1,`+
		`"kv_connector_extra_config":{"prefill":{"dp_size":2,"tp_size":8},"decode":{"dp_size":16,"tp_size":1}}}`,
		out.KVTransfer.JSON(), "before 0.11")

	out, err = c.Render(launch.Target{Endpoint: d, Engines: engines, Resources: config.Resources{MaxMemory: "1Gi"}})
	require.NoError(t, err)
	assert.Equal(t, "resources.maxMemory", out.Notes[0].Path)
	assert.True(t, out.Notes[0].NoEffect)
	_, err = c.Render(launch.Target{Endpoint: engine(t, "http://10.0.0.7:8300", discovery.RoleBoth)})
	require.ErrorContains(t, err, "either sends or receives")
}

func TestAscendEnginesThatDoNotFitAreRefused(t *testing.T) {
	p := engine(t, "http://10.0.0.5:8100", discovery.RolePrefill, "tpSize", "4")
	for rule, other := range map[string]discovery.Endpoint{
		"P's tpSize is no multiple of D's": engine(t, "http://d:1", discovery.RoleDecode,
			"tpSize", "8"),
		"two P with different tpSize": engine(t, "http://q:1", discovery.RolePrefill,
			"tpSize", "8"),
		"two P with different dpSize": engine(t, "http://q:1", discovery.RolePrefill,
			"tpSize", "4", "dpSize", "2"),
		"an attribute that is no whole number": engine(t, "http://d:1", discovery.RoleDecode,
			"tpSize", "x"),
	} {
		_, err := open(t, "mooncake-ascend", ``).Render(launch.Target{Endpoint: p,
			Engines: []discovery.Endpoint{p, other}})
		var bad *attr.Error
		require.ErrorAs(t, err, &bad, rule)
	}
}
