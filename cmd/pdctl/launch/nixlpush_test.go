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

// P must be launched with what D is told about P.
func TestThePrefillEngineIsLaunchedAsItsAttributesSay(t *testing.T) {
	p := engine(t, "http://10.0.0.1:8000", discovery.RolePrefill, "engineID", "pdkit-prefill", "sideChannelHost",
		"10.1.0.1", "sideChannelPort", "5777", "tpSize", "4", "ppSize", "2", "dpSize", "3")
	s, err := open(t, "nixl-push", `{"leaseDuration":"45s"}`).
		Render(launch.Target{Endpoint: p, Engines: []discovery.Endpoint{p}})
	require.NoError(t, err)
	assert.JSONEq(t, `{"kv_connector":"NixlPushConnector","kv_role":"kv_producer","engine_id":"pdkit-prefill",`+
		`"kv_load_failure_policy":"fail","kv_connector_extra_config":{"kv_lease_duration":45}}`, s.KVTransfer.JSON())
	assert.Equal(
		t, []launch.EnvVar{{Name: "VLLM_NIXL_SIDE_CHANNEL_HOST", Value: "10.1.0.1"},
			{Name: "VLLM_NIXL_SIDE_CHANNEL_PORT", Value: "5777"}, {Name: "PYTHONHASHSEED", Value: "0"}}, s.Env,
	)
	assert.Equal(
		t, []string{"--enable-prompt-tokens-details", "--tensor-parallel-size", "4", "--pipeline-parallel-size", "2",
			"--data-parallel-size", "3"}, s.Args,
	)
	require.Len(t, s.Notes, 1)
	assert.Equal(t, "attributes.engineID", s.Notes[0].Path)
}

func TestTheDecodeEngineNeedsNoFixedID(t *testing.T) {
	p, d := engine(t, "http://10.0.0.1:8000", discovery.RolePrefill, "engineID", "pdkit-prefill", "sideChannelPort",
		"5600"),
		engine(t, "http://10.0.0.1:8000", discovery.RoleDecode)
	d.ID = "d"
	s, err := open(t, "nixl-push", ``).Render(
		launch.Target{Endpoint: d, Engines: []discovery.Endpoint{p, d}, CPU: true,
			Resources: config.Resources{MaxDisk: "1Gi"}},
	)
	require.NoError(t, err)
	assert.JSONEq(t, `{"kv_connector":"NixlPushConnector","kv_role":"kv_consumer","kv_buffer_device":"cpu",`+
		`"kv_load_failure_policy":"fail","kv_connector_extra_config":{"kv_lease_duration":30}}`, s.KVTransfer.JSON())
	assert.Contains(t, s.Env, launch.EnvVar{Name: "VLLM_NIXL_SIDE_CHANNEL_PORT", Value: "5601"},
		"P has the first on this host")
	assert.Contains(t, s.Env, launch.EnvVar{Name: "UCX_TLS", Value: "tcp"})
	assert.Equal(t, "resources.maxDisk", s.Notes[0].Path)
	assert.True(t, s.Notes[0].NoEffect)
}

func TestNixlPushThatCannotBeRendered(t *testing.T) {
	_, err := open(t, "nixl-push", ``).Render(launch.Target{Endpoint: engine(t, "http://10.0.0.1:8000",
		discovery.RolePrefill)})
	require.ErrorContains(t, err, "attributes.engineID",
		"nobody could be told of an id that the engine makes by itself")
	_, err = open(t, "nixl-push", `{"dispatch":"serial"}`).
		Render(launch.Target{Endpoint: engine(t, "http://10.0.0.1:8000", discovery.RolePrefill)})
	require.NoError(t, err, "P's response names it")
	_, err = open(t, "nixl-push", ``).Render(launch.Target{Endpoint: engine(t, "http://10.0.0.1:8000",
		discovery.RoleDecode), Version: launch.Version{Minor: 22}})
	require.ErrorContains(t, err, "no NixlPushConnector")
}
