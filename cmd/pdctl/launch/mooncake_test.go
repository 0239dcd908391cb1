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

func TestMooncakeByRole(t *testing.T) {
	p, d := engine(t, "http://10.0.0.1:8100", discovery.RolePrefill),
		engine(t, "http://10.0.0.2:8200", discovery.RolePrefill)
	d.Role = discovery.RoleDecode
	all := []discovery.Endpoint{p, d}
	s := render(t, "mooncake", ``, launch.Target{Endpoint: p, Engines: all})
	assert.JSONEq(t, `{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_load_failure_policy":"fail"}`,
		s.KVTransfer.JSON())
	assert.Equal(t, []launch.EnvVar{{Name: "VLLM_MOONCAKE_BOOTSTRAP_PORT", Value: "8998"}}, s.Env)
	require.Len(t, s.Notes, 1)
	assert.Equal(t, "config.abortTimeout", s.Notes[0].Path, "480 s is long for an orphan")

	s = render(t, "mooncake", ``, launch.Target{Endpoint: d, Engines: all})
	assert.JSONEq(t, `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer","kv_load_failure_policy":"fail"}`,
		s.KVTransfer.JSON())
	assert.Empty(t, s.Env, "only P has a bootstrap server")

	p.Role = discovery.RoleBoth
	assert.Equal(t, "kv_both", render(t, "mooncake", ``, launch.Target{Endpoint: p}).KVTransfer.Role)
}

func TestMooncakesSettings(t *testing.T) {
	const o = `{"bootstrapPort":9998,"abortTimeout":"90s","num_workers":20,"mooncake_protocol":"tcp",` +
		`"device_name":"mlx5_0,mlx5_1","prefill_side_swa_replay":true}`
	p := engine(t, "http://h:8100", discovery.RolePrefill)
	s := render(t, "mooncake", o, launch.Target{Endpoint: p})
	assert.JSONEq(t, `{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_load_failure_policy":"fail",`+
		`"kv_connector_extra_config":{"num_workers":20,"mooncake_protocol":"tcp","device_name":"mlx5_0,mlx5_1",`+
		`"prefill_side_swa_replay":true}}`, s.KVTransfer.JSON())
	assert.Equal(
		t, []launch.EnvVar{{Name: "VLLM_MOONCAKE_BOOTSTRAP_PORT", Value: "9998"},
			{Name: "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", Value: "90"}}, s.Env,
	)
	assert.Empty(t, s.Notes)

	p.Attributes["bootstrapURL"] = "http://h"
	s = render(t, "mooncake", o, launch.Target{Endpoint: p})
	assert.Equal(t, "80", s.Env[0].Value, "the attribute wins")
	assert.Equal(t, "config.bootstrapPort", s.Notes[0].Path)

	s = render(t, "mooncake", `{"bootstrap_server_address":"boot:8998"}`, launch.Target{Endpoint: p})
	assert.Equal(t, map[string]any{"bootstrap_server_address": "boot:8998"}, s.KVTransfer.Extra)
	assert.Empty(t, s.Env, "the engine launches no server of its own")

	_, err := open(t, "mooncake", ``).Render(launch.Target{Endpoint: engine(t, "http://h:1", discovery.RolePrefill,
		"bootstrapPort", "x")})
	require.Error(t, err)
}

func TestBootstrapPortsThatClashAreToldOf(t *testing.T) {
	p, q := engine(t, "http://h:8100", discovery.RolePrefill), engine(t, "http://h:8101", discovery.RolePrefill)
	s := render(t, "mooncake", ``, launch.Target{Endpoint: p, Engines: []discovery.Endpoint{p, q}})
	assert.Equal(t, "attributes.bootstrapPort", s.Notes[0].Path)
	q.Attributes["bootstrapPort"] = "8999"
	assert.Len(t, render(t, "mooncake", ``, launch.Target{Endpoint: p, Engines: []discovery.Endpoint{p, q}}).Notes, 1)
}

func TestMooncakesOlderProtocolIsToldOf(t *testing.T) {
	p := engine(t, "http://h:8100", discovery.RolePrefill)
	for minor, noted := range map[int]bool{12: true, 15: true, 16: false, 32: false} {
		paths := map[string]bool{}
		for _, n := range render(t, "mooncake", ``,
			launch.Target{Endpoint: p, Version: launch.Version{Minor: minor}}).Notes {
			paths[n.Path] = true
		}
		assert.Equal(t, noted, paths["version"], "0.%d", minor)
	}
}

func TestMooncakeOnACPU(t *testing.T) {
	s := render(t, "mooncake", ``, launch.Target{Endpoint: engine(t, "http://h:8100", discovery.RolePrefill),
		CPU: true})
	assert.Equal(t, "mooncake_cpu", s.KVTransfer.ModulePath)
	assert.Equal(t, map[string]any{"mooncake_protocol": "tcp"}, s.KVTransfer.Extra)
	assert.Contains(t, s.Env, launch.EnvVar{Name: "MC_FORCE_TCP", Value: "true"})
}

func TestResourcesHaveNoEffectOnMooncake(t *testing.T) {
	s := render(
		t, "mooncake", ``, launch.Target{Endpoint: engine(t, "http://h:8100", discovery.RolePrefill),
			Resources: config.Resources{MaxMemory: "8Gi", MaxDisk: "1Ti", MaxBandwidth: "1G"}},
	)
	assert.Equal(t, []string{"resources.maxMemory", "resources.maxDisk", "resources.maxBandwidth"}, idle(s))
}
