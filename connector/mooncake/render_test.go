// SPDX-License-Identifier: Apache-2.0

package mooncake_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/connector/mooncake"
	"github.com/pdkit/pdkit/discovery"
)

func render(t *testing.T, o *mooncake.Options, target launch.Target) launch.Settings {
	t.Helper()
	s, err := newConnector(t, o).Render(target)
	require.NoError(t, err)
	return s
}

func TestRenderRoles(t *testing.T) {
	p, d := endpoint(t, "http://10.0.0.1:8100"), endpoint(t, "http://10.0.0.2:8200")
	d.Role = discovery.RoleDecode
	all := []discovery.Endpoint{p, d}
	s := render(t, nil, launch.Target{Endpoint: p, Engines: all})
	assert.JSONEq(t, `{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_load_failure_policy":"fail"}`,
		s.KVTransfer.JSON())
	assert.Equal(t, []launch.EnvVar{{Name: "VLLM_MOONCAKE_BOOTSTRAP_PORT", Value: "8998"}}, s.Env)
	require.Len(t, s.Notes, 1)
	assert.Equal(t, "config.abortTimeout", s.Notes[0].Path, "480 s is long for an orphan")

	s = render(t, nil, launch.Target{Endpoint: d, Engines: all})
	assert.JSONEq(t, `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer","kv_load_failure_policy":"fail"}`,
		s.KVTransfer.JSON())
	assert.Empty(t, s.Env, "only P has a bootstrap server")

	p.Role = discovery.RoleBoth
	assert.Equal(t, "kv_both", render(t, nil, launch.Target{Endpoint: p}).KVTransfer.Role)
}

func TestRenderSettings(t *testing.T) {
	o := &mooncake.Options{BootstrapPort: 9998, AbortTimeout: config.Duration(90 * time.Second), NumWorkers: 20,
		Protocol: "tcp", DeviceName: "mlx5_0,mlx5_1", PrefillSideSWAReplay: true}
	p := endpoint(t, "http://h:8100")
	s := render(t, o, launch.Target{Endpoint: p})
	assert.JSONEq(t, `{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_load_failure_policy":"fail",`+
		`"kv_connector_extra_config":{"num_workers":20,"mooncake_protocol":"tcp","device_name":"mlx5_0,mlx5_1",`+
		`"prefill_side_swa_replay":true}}`, s.KVTransfer.JSON())
	assert.Equal(
		t, []launch.EnvVar{{Name: "VLLM_MOONCAKE_BOOTSTRAP_PORT", Value: "9998"},
			{Name: "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", Value: "90"}}, s.Env,
	)
	assert.Empty(t, s.Notes)

	p.Attributes["bootstrapURL"] = "http://h"
	s = render(t, o, launch.Target{Endpoint: p})
	assert.Equal(t, "80", s.Env[0].Value, "the attribute wins")
	assert.Equal(t, "config.bootstrapPort", s.Notes[0].Path)

	s = render(t, &mooncake.Options{BootstrapServerAddress: "boot:8998"}, launch.Target{Endpoint: p})
	assert.Equal(t, map[string]any{"bootstrap_server_address": "boot:8998"}, s.KVTransfer.Extra)
	assert.Empty(t, s.Env, "the engine launches no server of its own")

	_, err := newConnector(t, nil).Render(launch.Target{Endpoint: endpoint(t, "http://h:1", "bootstrapPort", "x")})
	require.Error(t, err)
}

func TestRenderTellsOfPortsThatClash(t *testing.T) {
	p, q := endpoint(t, "http://h:8100"), endpoint(t, "http://h:8101")
	s := render(t, nil, launch.Target{Endpoint: p, Engines: []discovery.Endpoint{p, q}})
	assert.Equal(t, "attributes.bootstrapPort", s.Notes[0].Path)
	q.Attributes["bootstrapPort"] = "8999"
	assert.Len(t, render(t, nil, launch.Target{Endpoint: p, Engines: []discovery.Endpoint{p, q}}).Notes, 1)
}

func TestRenderTellsOfEnginesThatSpeakAnotherProtocol(t *testing.T) {
	p := endpoint(t, "http://h:8100")
	for minor, noted := range map[int]bool{12: true, 15: true, 16: false, 32: false} {
		paths := map[string]bool{}
		for _, n := range render(t, nil, launch.Target{Endpoint: p, Version: launch.Version{Minor: minor}}).Notes {
			paths[n.Path] = true
		}
		assert.Equal(t, noted, paths["version"], "0.%d", minor)
	}
}

func TestRenderOnACPU(t *testing.T) {
	s := render(t, nil, launch.Target{Endpoint: endpoint(t, "http://h:8100"), CPU: true})
	assert.Equal(t, "mooncake_cpu", s.KVTransfer.ModulePath)
	assert.Equal(t, map[string]any{"mooncake_protocol": "tcp"}, s.KVTransfer.Extra)
	assert.Contains(t, s.Env, launch.EnvVar{Name: "MC_FORCE_TCP", Value: "true"})
}

func TestRenderTellsWhichResourcesHaveNoEffect(t *testing.T) {
	s := render(
		t, nil, launch.Target{Endpoint: endpoint(t, "http://h:8100"),
			Resources: config.Resources{MaxMemory: "8Gi", MaxDisk: "1Ti", MaxBandwidth: "1G"}},
	)
	var paths []string
	for _, n := range s.Notes {
		if n.NoEffect {
			paths = append(paths, n.Path)
		}
	}
	assert.Equal(t, []string{"resources.maxMemory", "resources.maxDisk", "resources.maxBandwidth"}, paths)
}
