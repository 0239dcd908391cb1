// SPDX-License-Identifier: Apache-2.0

package lmcachepd_test

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/connector/lmcachepd"
	"github.com/pdkit/pdkit/discovery"
)

func target(role discovery.Role) launch.Target {
	e := decodeEngine(receiverOfTwo)
	e.Role = role
	return launch.Target{Endpoint: e, Model: "m", Gateway: "gateway.default.svc"}
}

func render(t *testing.T, config string, on launch.Target) launch.Settings {
	t.Helper()
	c, err := factory(json.RawMessage(config))
	require.NoError(t, err)
	r, ok := connector.As[launch.Renderer](c)
	require.True(t, ok)
	set, err := r.Render(on)
	require.NoError(t, err)
	return set
}

// note finds a note by its path.
func note(t *testing.T, set launch.Settings, path string) launch.Note {
	t.Helper()
	for _, n := range set.Notes {
		if n.Path == path {
			return n
		}
	}
	require.Failf(t, "no note", "%s in %v", path, set.Notes)
	return launch.Note{}
}

// These are the settings of LMCache's examples/disagg_prefill/1p1d at 02fe058c and 07e07869, with this deployment's
// addresses.
func TestSenderAndReceiver(t *testing.T) {
	p := render(t, `{"notifyListen":"0.0.0.0:7500"}`, target(discovery.RolePrefill))
	assert.Equal(t, "vllm", p.Engine)
	assert.Equal(t, `{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_producer",`+
		`"kv_connector_extra_config":{"discard_partial_chunks":false,"lmcache_rpc_port":"producer0"}}`,
		p.KVTransfer.JSON())
	require.Len(t, p.Files, 1)
	assert.Equal(t, `local_cpu: false
save_unfull_chunk: true
enable_pd: true
transfer_channel: "nixl"
pd_role: "sender"
pd_proxy_host: "gateway.default.svc"
pd_proxy_port: 7500
pd_buffer_size: 1073741824
pd_buffer_device: "cuda"
pd_allocation_timeout_sec: 10
nixl_backends: ["UCX"]
`, p.Files[0].Content)
	assert.Equal(t, []launch.EnvVar{
		{Name: "PYTHONHASHSEED", Value: "0"}, {Name: "UCX_TLS", Value: "cuda_ipc,cuda_copy,tcp"},
		{Name: "LMCACHE_CONFIG_FILE", Value: p.Files[0].Name},
	}, p.Env)

	on := target(discovery.RoleDecode)
	on.Index, on.CPU, on.Resources = 2, true, config.Resources{MaxMemory: "2Gi", MaxDisk: "1Gi", MaxBandwidth: "1G"}
	d := render(t, `{"notifyTimeout":"2500ms"}`, on)
	assert.Equal(t, `{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_consumer",`+
		`"kv_connector_extra_config":{"discard_partial_chunks":false,"lmcache_rpc_port":"consumer2"}}`,
		d.KVTransfer.JSON())
	assert.Equal(t, "lmcache-pd-decode-2.yaml", d.Files[0].Name)
	assert.Equal(t, `local_cpu: false
save_unfull_chunk: true
enable_pd: true
transfer_channel: "nixl"
pd_role: "receiver"
pd_peer_host: "10.0.0.7"
pd_peer_init_port: [8300,8301]
pd_peer_alloc_port: [8400,8401]
pd_buffer_size: 2147483648
pd_buffer_device: "cpu"
pd_allocation_timeout_sec: 2.5
nixl_backends: ["UCX"]
`, d.Files[0].Content)
	assert.False(t, note(t, d, "resources.maxMemory").NoEffect)
	assert.True(t, note(t, d, "resources.maxDisk").NoEffect)
	assert.True(t, note(t, d, "resources.maxBandwidth").NoEffect)
}

// The gateway waits for a notice from as many ranks as D has ports, and D has a port for each rank. So both engines
// need as many ranks.
func TestRanks(t *testing.T) {
	d, p := target(discovery.RoleDecode), target(discovery.RolePrefill)
	p.Engines = []discovery.Endpoint{p.Endpoint, d.Endpoint}
	two := []string{"--enable-prompt-tokens-details", "--tensor-parallel-size", "2"}
	assert.Equal(t, two, render(t, `{}`, d).Args)
	assert.Equal(t, two, render(t, `{}`, p).Args)
	assert.Equal(t, two[:1], render(t, `{"notifications":1}`, p).Args, "one rank may send for all")
	d.Endpoint.Attributes = map[string]string{"receiverInitPorts": "1", "receiverAllocPorts": "2"}
	assert.Equal(t, two[:1], render(t, `{}`, d).Args)
}

// The lookup leaves out the last token only if that token is P's own; otherwise it would miss the last chunk.
func TestSkipLastNTokensGoesWithTheFirstToken(t *testing.T) {
	assert.Equal(
		t, 1, render(t, `{"retFirstTok":true}`, target(discovery.RoleDecode)).KVTransfer.Extra["skip_last_n_tokens"],
	)
	assert.NotContains(t, render(t, `{"retFirstTok":true}`, target(discovery.RolePrefill)).KVTransfer.Extra,
		"skip_last_n_tokens")
	assert.NotContains(t, render(t, `{}`, target(discovery.RoleDecode)).KVTransfer.Extra, "skip_last_n_tokens")
}

// The launch guide's file has names of 2025. They become today's, and notes name the settings that are gone.
func TestTheLaunchGuidesOldSettings(t *testing.T) {
	const guide = `{"config_path":"lmcache-config.yaml","enable_nixl":true,"nixl_role":"sender",` +
		`"nixl_peer_host":"10.9.9.9","nixl_peer_port":55555,"nixl_buffer_size":2147483648,"nixl_buffer_device":"cpu",` +
		`"nixl_enable_gc":true,"chunk_size":128}`
	p := render(t, guide, target(discovery.RolePrefill))
	for _, line := range []string{"enable_pd: true", `pd_role: "sender"`, "pd_buffer_size: 2147483648",
		`pd_buffer_device: "cpu"`, "chunk_size: 128"} {
		assert.Contains(t, p.Files[0].Content, line+"\n")
	}
	assert.NotContains(t, p.Files[0].Content, "nixl_buffer")
	assert.NotContains(t, p.Files[0].Content, "peer")
	for path, without := range map[string]bool{
		"config.enable_nixl": false, "config.nixl_role": false, "config.nixl_buffer_size": false,
		"config.nixl_buffer_device": false, "config.chunk_size": false,
		"config.nixl_peer_host": true, "config.nixl_peer_port": true, "config.nixl_enable_gc": true,
		"config.config_path": true,
	} {
		assert.Equal(t, without, note(t, p, path).NoEffect, path)
	}

	on := target(discovery.RoleDecode)
	on.Endpoint.Attributes = map[string]string{"receiverAllocPorts": "55556"}
	d := render(t, guide, on)
	assert.Contains(t, d.Files[0].Content, "pd_peer_host: \"10.9.9.9\"\npd_peer_init_port: [55555]\n"+
		"pd_peer_alloc_port: [55556]\n")
	assert.True(t, note(t, d, "config.nixl_role").NoEffect, "the engine's role decides")
	assert.False(t, note(t, d, "config.nixl_peer_port").NoEffect)
	assert.True(t, note(t, render(t, guide, target(discovery.RoleDecode)), "config.nixl_peer_port").NoEffect,
		"the attribute decides")
}

// The launch guide's file is used as it is, without further engines. The receiver had one port in 2025 and has two now.
// If no gateway is named, it is on the engines' own machine.
func TestTheLaunchGuidesOnePortBecomesTwo(t *testing.T) {
	const guide = `{"enable_nixl":true,"nixl_role":"receiver","nixl_peer_host":"localhost","nixl_peer_port":55555,` +
		`"nixl_buffer_size":1073741824}`
	on := target(discovery.RoleDecode)
	on.Endpoint = decodeEngine(nil)
	d := render(t, guide, on)
	assert.Contains(t, d.Files[0].Content, "pd_peer_init_port: [55555]\npd_peer_alloc_port: [55655]\n")
	assert.Contains(t, note(t, d, "config.nixl_peer_port").Text, "pd_peer_alloc_port, which is not given, is 100 above")
	c, err := factory(json.RawMessage(guide))
	require.NoError(t, err)
	require.NoError(t, connector.CheckEndpoint(c, on.Endpoint), "requests are sent there")

	_, err = factory(json.RawMessage(`{"enable_nixl":true,"nixl_peer_port":65500}`))
	faults := config.FieldErrors(err)
	require.Len(t, faults, 1)
	assert.Equal(t, "pd_peer_alloc_port", faults[0].Path)

	c, err = factory(json.RawMessage(`{"enable_pd":true,"pd_peer_init_port":7300}`))
	require.NoError(t, err)
	require.ErrorContains(t, connector.CheckEndpoint(c, on.Endpoint), "receiverAllocPorts",
		"today's names come in pairs")
}

func TestTheGatewaysAddress(t *testing.T) {
	on := target(discovery.RolePrefill)
	on.Gateway = ""
	for listen, want := range map[string]string{
		"":                 "pd_proxy_host: \"127.0.0.1\"\npd_proxy_port: 8500\n",
		"0.0.0.0:7500":     "pd_proxy_host: \"127.0.0.1\"\npd_proxy_port: 7500\n",
		":7500":            "pd_proxy_host: \"127.0.0.1\"\npd_proxy_port: 7500\n",
		"[::]:7500":        "pd_proxy_host: \"127.0.0.1\"\npd_proxy_port: 7500\n",
		"192.168.0.9:7500": "pd_proxy_host: \"192.168.0.9\"\npd_proxy_port: 7500\n",
	} {
		config, err := json.Marshal(map[string]string{"notifyListen": listen})
		require.NoError(t, err)
		assert.Contains(t, render(t, string(config), on).Files[0].Content, want, listen)
	}
	told := func(config string, on launch.Target) bool {
		return slices.ContainsFunc(render(t, config, on).Notes, func(n launch.Note) bool { return n.Path == "" })
	}
	assert.True(t, told(`{}`, on), "an engine on another machine does not find it there")
	assert.False(t, told(`{"pd_proxy_host":"h"}`, on))
	assert.False(t, told(`{}`, target(discovery.RolePrefill)))
	here, err := discovery.New("http://127.0.0.1:8100", discovery.RolePrefill)
	require.NoError(t, err)
	assert.False(t, told(`{}`, launch.Target{Endpoint: here}))
	assert.Contains(t, render(t, `{"pd_proxy_host":"nat.example","pd_proxy_port":1}`, on).Files[0].Content,
		"pd_proxy_host: \"nat.example\"\npd_proxy_port: 1\n")
}

func TestEnginesThatCannotBeRendered(t *testing.T) {
	r, ok := connector.As[launch.Renderer](connector.KVConnector(open(t, nil)))
	require.True(t, ok)
	_, err := r.Render(target(discovery.RoleBoth))
	require.ErrorContains(t, err, "sender and receiver")
	on := target(discovery.RoleDecode)
	on.Endpoint.Attributes = nil
	_, err = r.Render(on)
	require.ErrorContains(t, err, "receiverInitPorts")
	assert.Contains(t, render(t, `{"pd_backend_mode":"sync"}`, target(discovery.RoleBoth)).Files[0].Content,
		`pd_role: "both"`)
}

func TestPartialChunksThatAreDiscardedAreToldOf(t *testing.T) {
	set := render(t, `{"discard_partial_chunks":true,"lmcache_rpc_port":"10086"}`, target(discovery.RolePrefill))
	assert.Equal(t, true, set.KVTransfer.Extra["discard_partial_chunks"])
	assert.Equal(t, "10086", set.KVTransfer.Extra["lmcache_rpc_port"])
	told := false
	for _, n := range set.Notes {
		told = told || n.Path == "config.discard_partial_chunks" && n.Text != "kv_connector_extra_config"
	}
	assert.True(t, told)
}

func TestBadValuesAreRefusedAtTheirPath(t *testing.T) {
	for settings, path := range map[string]string{
		`{"notifyListen":"8500"}`:                     "notifyListen",
		`{"notifyListen":"h:port"}`:                   "notifyListen",
		`{"notifyListen":"h:65536"}`:                  "notifyListen",
		`{"notifyTimeout":"0s"}`:                      "notifyTimeout",
		`{"notifyTimeout":10}`:                        "notifyTimeout",
		`{"notifications":-1}`:                        "notifications",
		`{"notifications":5000}`:                      "notifications",
		`{"retFirstTok":"yes"}`:                       "retFirstTok",
		`{"retFirstToken":true}`:                      "retFirstToken",
		`{"enable_pd":false}`:                         "enable_pd",
		`{"lmcache.enable_nixl":"False"}`:             "lmcache.enable_nixl",
		`{"lmcache.pd_skip_proxy_notification":true}`: "lmcache.pd_skip_proxy_notification",
		`{"nixl_role":"prefiller"}`:                   "nixl_role",
		`{"pd_backend_mode":"fast"}`:                  "pd_backend_mode",
		`{"enable_p2p":true}`:                         "enable_p2p",
		`{"nixl_peer_port":0}`:                        "nixl_peer_port",
		`{"pd_proxy_port":70000}`:                     "pd_proxy_port",
		`{"pd_peer_init_port":"a"}`:                   "pd_peer_init_port",
		`{"pd_buffer_size":1,"nixl_buffer_size":2}`:   "pd_buffer_size",
		`{"enable_pd":true,"lmcache.enable_pd":true}`: "lmcache.enable_pd",
		`{"lmcache.pd_proxy_hots":"h"}`:               "lmcache.pd_proxy_hots",
	} {
		_, err := factory(json.RawMessage(settings))
		faults := config.FieldErrors(err)
		require.Len(t, faults, 1, settings)
		assert.Equal(t, path, faults[0].Path, settings)
		assert.NotEmpty(t, faults[0].Remedy, settings)
	}
}

// These are all settings that Kthena's issue 1069 tried, but without the switch that keeps P from sending notices.
func TestTheSettingsOfIssue1069(t *testing.T) {
	_, err := factory(
		json.RawMessage(
			`{"lmcache.enable_pd":true,"lmcache.pd_role":"sender","lmcache.transfer_channel":"nixl",
			"lmcache.nixl_backends":["UCX"],
		"lmcache.pd_peer_host":"h","lmcache.pd_peer_init_port":"10086","lmcache.pd_peer_alloc_port":"10087",
		"lmcache.pd_buffer_device":"cuda"}`))
	require.NoError(t, err)
	_, err = lmcachepd.New(nil)
	require.NoError(t, err)
}
