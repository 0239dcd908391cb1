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

func environment(s launch.Settings) map[string]string {
	m := map[string]string{}
	for _, e := range s.Env {
		m[e.Name] = e.Value
	}
	return m
}

func TestOffloadByDefault(t *testing.T) {
	p := engine(t, "http://10.0.0.1:8100", discovery.RolePrefill)
	s := render(t, "offload-p2p", ``, launch.Target{Endpoint: p})
	assert.JSONEq(t, `{"kv_connector":"OffloadingConnector","kv_role":"kv_both",`+
		`"kv_connector_extra_config":{"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":8589934592,`+
		`"secondary_tiers":[{"type":"p2p"}]}}`, s.KVTransfer.JSON())
	assert.Equal(
		t, map[string]string{"PYTHONHASHSEED": "0", "VLLM_P2P_SIDE_CHANNEL_HOST": "10.0.0.1",
			"VLLM_P2P_SIDE_CHANNEL_PORT": "7777"}, environment(s), "the engine's own default is 5710",
	)
	require.Len(t, s.Notes, 1)
	assert.Equal(t, "config.cpu_bytes_to_use", s.Notes[0].Path, "vLLM has no default")
}

// Each engine of a host gets a port of its own. The gateway needs to know only P's.
func TestOffloadsPorts(t *testing.T) {
	p := engine(t, "http://h:8100", discovery.RolePrefill, "dpSize", "2")
	d1, d2 := engine(t, "http://h:8200", discovery.RoleDecode), engine(t, "http://h:8201", discovery.RoleDecode)
	fixed := engine(t, "http://h:8202", discovery.RoleDecode, "p2pPort", "7780")
	far := engine(t, "http://g:8200", discovery.RoleDecode)
	all := []discovery.Endpoint{p, d1, fixed, d2, far}
	for e, want := range map[string]string{p.ID: "7777", d1.ID: "7779", d2.ID: "7781", fixed.ID: "7780",
		far.ID: "7777"} {
		for _, x := range all {
			if x.ID == e {
				assert.Equal(
					t, want,
					environment(render(t, "offload-p2p", ``,
						launch.Target{Endpoint: x, Engines: all}))["VLLM_P2P_SIDE_CHANNEL_PORT"],
					e,
				)
			}
		}
	}
	q := engine(t, "http://h:8101", discovery.RolePrefill)
	notes := render(t, "offload-p2p", `{"cpu_bytes_to_use":1}`,
		launch.Target{Endpoint: q, Engines: []discovery.Endpoint{p, q}}).Notes
	require.Len(t, notes, 1)
	assert.Equal(t, "attributes.p2pPort", notes[0].Path, "two prefill engines with one port")
	_, err := open(t, "offload-p2p", `{"port":65535}`).
		Render(
			launch.Target{
				Endpoint: d1, Engines: []discovery.Endpoint{engine(t, "http://h:8100", discovery.RolePrefill), d1},
			},
		)
	require.ErrorContains(t, err, "no port is left")
}

func TestOffloadsSettings(t *testing.T) {
	const o = `{"cpu_bytes_to_use":5,"block_size":64,"eviction_policy":"arc","offload_prompt_only":true,` +
		`"secondary_tiers":[{"type":"fs","root_dir":"/kv"},{"type":"p2p","host":"x","port":5710,"num_threads":8}]}`
	p := engine(t, "http://h:8100", discovery.RolePrefill)
	s := render(t, "offload-p2p", o, launch.Target{Endpoint: p,
		Resources: config.Resources{MaxMemory: "1Gi", MaxDisk: "1Gi"}})
	assert.JSONEq(
		t, `{"kv_connector":"OffloadingConnector","kv_role":"kv_both",
		"kv_connector_extra_config":{"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":5,"block_size":64,
		"eviction_policy":"arc",
		"offload_prompt_only":true,"secondary_tiers":[{"type":"fs","root_dir":"/kv"},{"type":"p2p","num_threads":8}]}}`,
		s.KVTransfer.JSON(), "the environment names host and port")
	assert.Equal(t, "5710", environment(s)["VLLM_P2P_SIDE_CHANNEL_PORT"])
	assert.Equal(t, []string{"resources.maxMemory", "resources.maxDisk"}, idle(s))
	assert.EqualValues(
		t, 1<<30, render(t, "offload-p2p", ``, launch.Target{Endpoint: p,
			Resources: config.Resources{MaxMemory: "1Gi"}}).
			KVTransfer.Extra["cpu_bytes_to_use"],
	)
}

// The tier was added between 0.23 and 0.25, and by 0.28 the keys had their present names.
func TestOffloadByVersion(t *testing.T) {
	p := engine(t, "http://h:8100", discovery.RolePrefill)
	_, err := open(t, "offload-p2p", ``).Render(launch.Target{Endpoint: p, Version: launch.Version{Minor: 23}})
	require.ErrorContains(t, err, "version")
	for minor, noted := range map[int]bool{25: true, 27: true, 28: false, 32: false} {
		paths := map[string]bool{}
		for _, n := range render(t, "offload-p2p", ``,
			launch.Target{Endpoint: p, Version: launch.Version{Minor: minor}}).Notes {
			paths[n.Path] = true
		}
		assert.Equal(t, noted, paths["version"], "0.%d", minor)
	}
	_, err = open(t, "offload-p2p", ``).Render(launch.Target{Endpoint: engine(t, "http://h:8100",
		discovery.RolePrefill, "p2pPort", "x")})
	require.ErrorContains(t, err, "attributes.p2pPort")
}
