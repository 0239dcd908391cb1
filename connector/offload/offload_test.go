// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/connector/offload"
	"github.com/pdkit/pdkit/discovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(settings json.RawMessage) (connector.KVConnector, error) {
	return connector.Open(config.Spec{Type: offload.Name, Config: settings})
}

func newConnector(t testing.TB, o *offload.Options) *offload.Connector {
	t.Helper()
	c, err := offload.New(o)
	require.NoError(t, err)
	return c
}

func TestGolden(t *testing.T) { connectortest.Golden(t, open, "testdata/golden") }

func harness(dispatch string) connectortest.Harness {
	return connectortest.Harness{
		Name: offload.Name,
		New:  open,
		Config: json.RawMessage(`{"dispatch":"` + dispatch +
			`","port":6000,"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":1073741824,"blocks_per_chunk":2,` +
			`"eviction_policy":"arc",` +
			`"cache_policy_module_path":"m","offload_prompt_only":false,"self_describing_kv_events":true,` +
			`"secondary_tiers":[{"type":"p2p","num_threads":8},{"type":"fs","root_dir":"/kv"}]}`),
		BadConfig: []json.RawMessage{
			json.RawMessage(`{"dispatch":"both"}`), json.RawMessage(`{"port":70000}`),
			json.RawMessage(`{"spec_name":"CPUOffloadingSpec"}`), json.RawMessage(`{"cpu_bytes_to_use":-1}`),
			json.RawMessage(`{"block_size":16,"blocks_per_chunk":2}`),
			json.RawMessage(`{"secondary_tiers":[{"type":"fs"}]}`), json.RawMessage(`{"secondary_tiers":[]}`),
			json.RawMessage(`{"secondary_tiers":[{"type":"p2p","port":"x"}]}`),
			json.RawMessage(`{"secondary_tiers":[{"type":"p2p","port":1.5}]}`),
		},
		Prefill: discovery.Endpoint{
			Attributes: map[string]string{"p2pHost": "planted-prefill.example", "p2pPort": "7780"},
		},
	}
}

func TestConformance(t *testing.T) {
	for _, dispatch := range []string{"together", "serial"} {
		t.Run(dispatch, func(t *testing.T) { connectortest.Run(t, harness(dispatch)) })
	}
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness("together")) }

func TestOrders(t *testing.T) {
	for settings, want := range map[string][]connector.Order{
		`{}`:                      {connector.Together, connector.PrefillThenDecode},
		`{"dispatch":"together"}`: {connector.Together, connector.PrefillThenDecode},
		`{"dispatch":"serial"}`:   {connector.PrefillThenDecode, connector.Together},
	} {
		c, err := connector.Open(config.Spec{Type: "OffloadingConnector", Config: json.RawMessage(settings)})
		require.NoError(t, err)
		assert.Equal(t, want, append([]connector.Order{c.Traits().Order}, c.Traits().OtherOrders...), settings)
		assert.False(t, c.Traits().Ending.Orphans, "D waits 30 s at most and blocks nothing")
	}
}

func endpoint(t testing.TB, url string, role discovery.Role, attributes ...string) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New(url, role)
	require.NoError(t, err)
	e.Attributes = map[string]string{}
	for i := 0; i+1 < len(attributes); i += 2 {
		e.Attributes[attributes[i]] = attributes[i+1]
	}
	return e
}

func TestCheckEndpoint(t *testing.T) {
	c := newConnector(t, nil)
	require.NoError(t, c.CheckEndpoint(endpoint(t, "http://h:1", discovery.RolePrefill)), "host and port have defaults")
	require.NoError(t, c.CheckEndpoint(endpoint(t, "http://h:1", discovery.RoleDecode, "p2pPort", "x")),
		"nobody asks D")
	for want, attributes := range map[string][]string{
		"attributes.p2pPort: leaves": {"p2pPort", "65535", "dpSize", "2"},
		"attributes.p2pPort: is not": {"p2pPort", "x"},
		"attributes.dpSize":          {"dpSize", "0"},
		"attributes.p2pHost":         {"p2pHost", "http://h"},
	} {
		require.ErrorContains(t, c.CheckEndpoint(endpoint(t, "http://h:1", discovery.RolePrefill, attributes...)), want)
	}
}

func render(t *testing.T, o *offload.Options, target launch.Target) launch.Settings {
	t.Helper()
	s, err := newConnector(t, o).Render(target)
	require.NoError(t, err)
	return s
}

func environment(s launch.Settings) map[string]string {
	m := map[string]string{}
	for _, e := range s.Env {
		m[e.Name] = e.Value
	}
	return m
}

func TestRenderDefaults(t *testing.T) {
	p := endpoint(t, "http://10.0.0.1:8100", discovery.RolePrefill)
	s := render(t, nil, launch.Target{Endpoint: p})
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
func TestRenderPorts(t *testing.T) {
	p := endpoint(t, "http://h:8100", discovery.RolePrefill, "dpSize", "2")
	d1, d2 := endpoint(t, "http://h:8200", discovery.RoleDecode), endpoint(t, "http://h:8201", discovery.RoleDecode)
	fixed := endpoint(t, "http://h:8202", discovery.RoleDecode, "p2pPort", "7780")
	far := endpoint(t, "http://g:8200", discovery.RoleDecode)
	all := []discovery.Endpoint{p, d1, fixed, d2, far}
	for e, want := range map[string]string{p.ID: "7777", d1.ID: "7779", d2.ID: "7781", fixed.ID: "7780",
		far.ID: "7777"} {
		for _, x := range all {
			if x.ID == e {
				assert.Equal(
					t, want,
					environment(render(t, nil, launch.Target{Endpoint: x, Engines: all}))["VLLM_P2P_SIDE_CHANNEL_PORT"],
					e,
				)
			}
		}
	}
	q := endpoint(t, "http://h:8101", discovery.RolePrefill)
	notes := render(t, &offload.Options{CPUBytesToUse: 1},
		launch.Target{Endpoint: q, Engines: []discovery.Endpoint{p, q}}).Notes
	require.Len(t, notes, 1)
	assert.Equal(t, "attributes.p2pPort", notes[0].Path, "two prefill engines with one port")
	_, err := newConnector(t, &offload.Options{Port: 65535}).
		Render(
			launch.Target{
				Endpoint: d1, Engines: []discovery.Endpoint{endpoint(t, "http://h:8100", discovery.RolePrefill), d1},
			},
		)
	require.ErrorContains(t, err, "no port is left")
}

func TestRenderSettings(t *testing.T) {
	yes := true
	o := &offload.Options{CPUBytesToUse: 5, BlockSize: 64, EvictionPolicy: "arc", OffloadPromptOnly: &yes,
		SecondaryTiers: []map[string]any{{"type": "fs", "root_dir": "/kv"},
			{"type": "p2p", "host": "x", "port": 5710.0, "num_threads": 8.0}}}
	p := endpoint(t, "http://h:8100", discovery.RolePrefill)
	s := render(t, o, launch.Target{Endpoint: p, Resources: config.Resources{MaxMemory: "1Gi", MaxDisk: "1Gi"}})
	assert.JSONEq(
		t, `{"kv_connector":"OffloadingConnector","kv_role":"kv_both",
		"kv_connector_extra_config":{"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":5,"block_size":64,
		"eviction_policy":"arc",
		"offload_prompt_only":true,"secondary_tiers":[{"type":"fs","root_dir":"/kv"},{"type":"p2p","num_threads":8}]}}`,
		s.KVTransfer.JSON(), "the environment names host and port")
	assert.Equal(t, "5710", environment(s)["VLLM_P2P_SIDE_CHANNEL_PORT"])
	assert.Equal(t, "x", o.SecondaryTiers[1]["host"], "the settings are not changed")
	var without []string
	for _, n := range s.Notes {
		if n.NoEffect {
			without = append(without, n.Path)
		}
	}
	assert.Equal(t, []string{"resources.maxMemory", "resources.maxDisk"}, without)
	assert.EqualValues(
		t, 1<<30, render(t, nil, launch.Target{Endpoint: p, Resources: config.Resources{MaxMemory: "1Gi"}}).
			KVTransfer.Extra["cpu_bytes_to_use"],
	)
}

// The tier was added between 0.23 and 0.25, and by 0.28 the keys had their present names.
func TestRenderVersions(t *testing.T) {
	p := endpoint(t, "http://h:8100", discovery.RolePrefill)
	_, err := newConnector(t, nil).Render(launch.Target{Endpoint: p, Version: launch.Version{Minor: 23}})
	require.ErrorContains(t, err, "version")
	for minor, noted := range map[int]bool{25: true, 27: true, 28: false, 32: false} {
		paths := map[string]bool{}
		for _, n := range render(t, nil, launch.Target{Endpoint: p, Version: launch.Version{Minor: minor}}).Notes {
			paths[n.Path] = true
		}
		assert.Equal(t, noted, paths["version"], "0.%d", minor)
	}
	_, err = newConnector(
		t, nil,
	).Render(launch.Target{Endpoint: endpoint(t, "http://h:8100", discovery.RolePrefill, "p2pPort", "x")})
	require.ErrorContains(t, err, "attributes.p2pPort")
}
