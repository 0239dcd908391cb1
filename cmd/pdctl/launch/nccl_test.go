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

// These are the settings of the design documents' example, and those of the connector's README.
func TestP2pNccl(t *testing.T) {
	c := open(t, "p2pnccl", `{"kv_buffer_size":"8e9","kv_port":"21001","proxy_ip":"10.0.1.1","proxy_port":"30001",`+
		`"http_port":"20001","send_type":"PUT_ASYNC","nccl_num_channels":"16"}`)
	s, err := c.Render(launch.Target{Endpoint: engine(t, "http://10.0.0.1:8100", discovery.RolePrefill),
		Version: launch.Version{Minor: 10}})
	require.NoError(t, err)
	assert.Equal(t, `{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer","kv_buffer_size":8000000000,`+
		`"kv_port":21001,"kv_connector_extra_config":{"http_port":"20001","nccl_num_channels":"16",`+
		`"proxy_ip":"10.0.1.1","proxy_port":"30001","send_type":"PUT_ASYNC"}}`, s.KVTransfer.JSON())
	assert.Empty(t, s.Env, "ids have no suffix before 0.14")

	s, err = c.Render(
		launch.Target{Endpoint: engine(t, "http://10.0.0.1:8100", discovery.RoleDecode, "zmqAddress",
			"10.0.1.3:22001"), Version: launch.Version{Minor: 20},
			Resources: config.Resources{MaxDisk: "1Gi"}},
	)
	require.NoError(t, err)
	assert.Equal(t, "kv_consumer", s.KVTransfer.Role)
	assert.Equal(t, 22001, s.KVTransfer.Port)
	assert.Equal(
		t, []launch.EnvVar{{Name: "VLLM_HOST_IP", Value: "10.0.1.3"},
			{Name: "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", Value: "1"}}, s.Env,
	)
	assert.Equal(t, []string{"config.kv_port", "resources.maxDisk"}, idle(s))

	c = open(t, "p2pnccl", `{"kv_ip":"10.0.0.1","http_port":1}`)
	s, err = c.Render(launch.Target{Endpoint: engine(t, "http://10.0.0.1:8100", discovery.RoleDecode, "zmqAddress",
		"d:1")})
	require.NoError(t, err)
	assert.Equal(t, `{"kv_connector":"P2pNcclConnector","kv_role":"kv_consumer","kv_port":1}`, s.KVTransfer.JSON())
	assert.Equal(t, []string{"config.kv_ip", "config.http_port"}, idle(s))

	for _, target := range []launch.Target{
		{Endpoint: engine(t, "http://10.0.0.1:8100", discovery.RoleDecode, "zmqAddress", "d:1"),
			Version: launch.Version{Minor: 23}},
		{Endpoint: engine(t, "http://10.0.0.1:8100", discovery.RoleDecode, "zmqAddress", "d:1"),
			Version: launch.Version{Minor: 8}},
		{Endpoint: engine(t, "http://10.0.0.1:8100", discovery.RoleDecode, "zmqAddress", "d:1"), CPU: true},
	} {
		_, err := c.Render(target)
		assert.Error(t, err)
	}

	// An engine of the role both serves what a pair cannot, so it needs neither the connector nor an address.
	s, err = c.Render(launch.Target{Endpoint: engine(t, "http://10.0.0.1:8100", discovery.RoleBoth)})
	require.NoError(t, err)
	assert.Nil(t, s.KVTransfer)
}

// These are the settings of the design documents' example.
func TestPyNccl(t *testing.T) {
	r := open(t, "pynccl", `{"kv_rank":0}`)
	old := launch.Version{Minor: 7, Patch: 3}
	s, err := r.Render(launch.Target{Endpoint: discovery.Endpoint{Role: discovery.RolePrefill}, Version: old})
	require.NoError(t, err)
	assert.Equal(t, `{"kv_connector":"PyNcclConnector","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2}`,
		s.KVTransfer.JSON())
	assert.Empty(t, s.Env)
	s, err = r.Render(
		launch.Target{Endpoint: discovery.Endpoint{Role: discovery.RoleDecode}, Index: 1,
			Resources: config.Resources{MaxMemory: "1Gi"}},
	)
	require.NoError(t, err)
	assert.Equal(t, `{"kv_connector":"PyNcclConnector","kv_role":"kv_consumer","kv_rank":1,"kv_parallel_size":2}`,
		s.KVTransfer.JSON())
	assert.Equal(t, []launch.EnvVar{{Name: "VLLM_USE_V1", Value: "0"}}, s.Env)
	assert.Equal(t, []string{"config.kv_rank", "resources.maxMemory"}, idle(s))
	for _, target := range []launch.Target{
		{Endpoint: discovery.Endpoint{Role: discovery.RoleDecode}, Version: launch.Version{Minor: 32}},
		{Endpoint: discovery.Endpoint{Role: discovery.RoleDecode}, Version: launch.Version{Minor: 5}},
		{Endpoint: discovery.Endpoint{Role: discovery.RoleBoth}},
		{Endpoint: discovery.Endpoint{Role: discovery.RoleDecode}, CPU: true},
	} {
		_, err := r.Render(target)
		assert.Error(t, err)
	}
}
