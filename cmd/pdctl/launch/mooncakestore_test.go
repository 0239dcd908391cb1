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

func TestMooncakeStoreByDefault(t *testing.T) {
	p, d := engine(t, "http://10.0.0.1:8100", discovery.RolePrefill),
		engine(t, "http://10.0.0.2:8200", discovery.RoleDecode)
	s := render(t, "mooncake-store", ``, launch.Target{Endpoint: p, Engines: []discovery.Endpoint{p, d}})
	assert.JSONEq(t, `{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both"}`, s.KVTransfer.JSON(),
		"P finds what it has computed before")
	assert.Equal(
		t, []launch.EnvVar{{Name: "PYTHONHASHSEED", Value: "0"},
			{Name: "MOONCAKE_CONFIG_PATH", Value: "mooncake.json"}}, s.Env,
	)
	require.Len(t, s.Files, 1)
	assert.JSONEq(t, `{"metadata_server":"P2PHANDSHAKE","master_server_address":"127.0.0.1:50051","protocol":"rdma",`+
		`"device_name":""}`, s.Files[0].Content)
	assert.Equal(
		t, []launch.Companion{{Name: "mooncake-master", Command: []string{"mooncake_master", "--port", "50051"}}},
		s.Companions,
	)
	require.Len(t, s.Notes, 1)
	assert.Equal(t, "config.master_server_address", s.Notes[0].Path, "a master on loopback serves one host only")

	assert.Equal(t, "kv_consumer", render(t, "mooncake-store", ``, launch.Target{Endpoint: d}).KVTransfer.Role)
	assert.Empty(t, render(t, "mooncake-store", ``, launch.Target{Endpoint: d, Engines: []discovery.Endpoint{d}}).Notes)
	assert.Contains(t, render(t, "mooncake-store", ``, launch.Target{Endpoint: d, CPU: true}).Files[0].Content,
		`"protocol": "tcp"`)
}

func TestMooncakeStoresSettings(t *testing.T) {
	s := render(t, "mooncake-store", `{"metadata_server":"http://m:8081/metadata","master_server_address":"m:50052",`+
		`"protocol":"tcp","device_name":"mlx5_0","global_segment_size":"80GB","local_buffer_size":1073741824,`+
		`"enable_offload":true,"tenant_id":"a","local_hostname":"h","preferred_segment":"o:1","load_async":false,`+
		`"cache_prefix":"p","prefill_tp_sizes":[4,2]}`,
		launch.Target{Endpoint: engine(t, "http://h:1", discovery.RolePrefill)})
	assert.JSONEq(
		t, `{"metadata_server":"http://m:8081/metadata","master_server_address":"m:50052","protocol":"tcp",
		"device_name":"mlx5_0","global_segment_size":"80GB",
		"local_buffer_size":1073741824,"enable_offload":true,"tenant_id":"a"}`, s.Files[0].Content)
	no := false
	assert.Equal(t, map[string]any{"load_async": &no, "cache_prefix": "p", "prefill_tp_sizes": []int{4, 2}},
		s.KVTransfer.Extra)
	assert.Equal(
		t, []string{"mooncake_master", "--port", "50052", "--enable_http_metadata_server=true",
			"--http_metadata_server_port=8081", "--enable_offload=true", "--enable_multi_tenants=true"},
		s.Companions[0].Command)
	assert.Subset(
		t, s.Env, []launch.EnvVar{{Name: "MOONCAKE_REQUESTER_LOCAL_HOSTNAME", Value: "h"},
			{Name: "MOONCAKE_PREFERRED_SEGMENT", Value: "o:1"}},
	)
}

func TestMooncakeStoresResources(t *testing.T) {
	r := config.Resources{MaxMemory: "8Gi", MaxDisk: "1Ti", MaxBandwidth: "1G"}
	target := launch.Target{Endpoint: engine(t, "http://h:1", discovery.RolePrefill), Resources: r}
	s := render(t, "mooncake-store", ``, target)
	assert.Contains(t, s.Files[0].Content, `"global_segment_size": 8589934592`)
	assert.Equal(
		t, map[string]bool{"resources.maxMemory": false, "resources.maxDisk": true, "resources.maxBandwidth": true},
		effects(s),
	)
	s = render(t, "mooncake-store", `{"global_segment_size":"1GB"}`, target)
	assert.Contains(t, s.Files[0].Content, `"global_segment_size": "1GB"`)
	assert.True(t, effects(s)["resources.maxMemory"], "the engine's own setting wins")
	s = render(t, "mooncake-store", `{"mode":"standalone-store"}`, target)
	assert.Contains(t, s.Files[0].Content, `"global_segment_size": 0`, "the engines give nothing")
	assert.True(t, effects(s)["resources.maxMemory"])
	_, err := open(t, "mooncake-store", ``).Render(launch.Target{Endpoint: target.Endpoint,
		Resources: config.Resources{MaxMemory: "0"}})
	require.ErrorContains(t, err, "resources.maxMemory")
}

// effects maps the paths of notes to whether the note says that the setting has no effect.
func effects(s launch.Settings) map[string]bool {
	m := map[string]bool{}
	for _, n := range s.Notes {
		if n.Path != "config.mode" {
			m[n.Path] = n.NoEffect
		}
	}
	return m
}
