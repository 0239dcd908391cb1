// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

var receiverOfTwo = []string{"receiverInitPorts", "8300,8301", "receiverAllocPorts", "8400,8401"}

func lmcachePD(t testing.TB, role discovery.Role) launch.Target {
	t.Helper()
	e := engine(t, "http://10.0.0.7:8200", role, receiverOfTwo...)
	return launch.Target{Endpoint: e, Model: "m", Gateway: "gateway.default.svc"}
}

// These are the settings of LMCache's examples/disagg_prefill/1p1d at 02fe058c and 07e07869, with this deployment's
// addresses.
func TestSenderAndReceiver(t *testing.T) {
	p := render(t, "lmcache-pd", `{"notifyListen":"0.0.0.0:7500"}`, lmcachePD(t, discovery.RolePrefill))
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

	on := lmcachePD(t, discovery.RoleDecode)
	on.Index, on.CPU, on.Resources = 2, true, config.Resources{MaxMemory: "2Gi", MaxDisk: "1Gi", MaxBandwidth: "1G"}
	d := render(t, "lmcache-pd", `{"notifyTimeout":"2500ms"}`, on)
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
func TestRanksOfLMCachePD(t *testing.T) {
	d, p := lmcachePD(t, discovery.RoleDecode), lmcachePD(t, discovery.RolePrefill)
	p.Engines = []discovery.Endpoint{p.Endpoint, d.Endpoint}
	two := []string{"--enable-prompt-tokens-details", "--tensor-parallel-size", "2"}
	assert.Equal(t, two, render(t, "lmcache-pd", `{}`, d).Args)
	assert.Equal(t, two, render(t, "lmcache-pd", `{}`, p).Args)
	assert.Equal(t, two[:1], render(t, "lmcache-pd", `{"notifications":1}`, p).Args, "one rank may send for all")
	d.Endpoint.Attributes = map[string]string{"receiverInitPorts": "1", "receiverAllocPorts": "2"}
	assert.Equal(t, two[:1], render(t, "lmcache-pd", `{}`, d).Args)
}

// The lookup leaves out the last token only if that token is P's own; otherwise it would miss the last chunk.
func TestSkipLastNTokensGoesWithTheFirstToken(t *testing.T) {
	assert.Equal(
		t, 1, render(t, "lmcache-pd", `{"retFirstTok":true}`,
			lmcachePD(t, discovery.RoleDecode)).KVTransfer.Extra["skip_last_n_tokens"],
	)
	assert.NotContains(t, render(t, "lmcache-pd", `{"retFirstTok":true}`,
		lmcachePD(t, discovery.RolePrefill)).KVTransfer.Extra,
		"skip_last_n_tokens")
	assert.NotContains(t, render(t, "lmcache-pd", `{}`, lmcachePD(t, discovery.RoleDecode)).KVTransfer.Extra,
		"skip_last_n_tokens")
}

// The launch guide's file has names of 2025. They become today's, and notes name the settings that are gone.
func TestTheLaunchGuidesOldSettings(t *testing.T) {
	const guide = `{"config_path":"lmcache-config.yaml","enable_nixl":true,"nixl_role":"sender",` +
		`"nixl_peer_host":"10.9.9.9","nixl_peer_port":55555,"nixl_buffer_size":2147483648,"nixl_buffer_device":"cpu",` +
		`"nixl_enable_gc":true,"chunk_size":128}`
	p := render(t, "lmcache-pd", guide, lmcachePD(t, discovery.RolePrefill))
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

	on := lmcachePD(t, discovery.RoleDecode)
	on.Endpoint.Attributes = map[string]string{"receiverAllocPorts": "55556"}
	d := render(t, "lmcache-pd", guide, on)
	assert.Contains(t, d.Files[0].Content, "pd_peer_host: \"10.9.9.9\"\npd_peer_init_port: [55555]\n"+
		"pd_peer_alloc_port: [55556]\n")
	assert.True(t, note(t, d, "config.nixl_role").NoEffect, "the engine's role decides")
	assert.False(t, note(t, d, "config.nixl_peer_port").NoEffect)
	assert.True(t, note(t, render(t, "lmcache-pd", guide, lmcachePD(t, discovery.RoleDecode)),
		"config.nixl_peer_port").NoEffect,
		"the attribute decides")
}

// The launch guide's file is used as it is, without further engines. The receiver had one port in 2025 and has two now.
// If no gateway is named, it is on the engines' own machine.
func TestTheLaunchGuidesOnePortBecomesTwo(t *testing.T) {
	const guide = `{"enable_nixl":true,"nixl_role":"receiver","nixl_peer_host":"localhost","nixl_peer_port":55555,` +
		`"nixl_buffer_size":1073741824}`
	on := lmcachePD(t, discovery.RoleDecode)
	on.Endpoint.Attributes = nil
	d := render(t, "lmcache-pd", guide, on)
	assert.Contains(t, d.Files[0].Content, "pd_peer_init_port: [55555]\npd_peer_alloc_port: [55655]\n")
	assert.Contains(t, note(t, d, "config.nixl_peer_port").Text, "pd_peer_alloc_port, which is not given, is 100 above")
}

func TestTheGatewaysAddressForNotices(t *testing.T) {
	on := lmcachePD(t, discovery.RolePrefill)
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
		assert.Contains(t, render(t, "lmcache-pd", string(config), on).Files[0].Content, want, listen)
	}
	told := func(config string, on launch.Target) bool {
		return slices.ContainsFunc(render(t, "lmcache-pd", config, on).Notes,
			func(n launch.Note) bool { return n.Path == "" })
	}
	assert.True(t, told(`{}`, on), "an engine on another machine does not find it there")
	assert.False(t, told(`{"pd_proxy_host":"h"}`, on))
	assert.False(t, told(`{}`, lmcachePD(t, discovery.RolePrefill)))
	here, err := discovery.New("http://127.0.0.1:8100", discovery.RolePrefill)
	require.NoError(t, err)
	assert.False(t, told(`{}`, launch.Target{Endpoint: here}))
	assert.Contains(t, render(t, "lmcache-pd", `{"pd_proxy_host":"nat.example","pd_proxy_port":1}`,
		on).Files[0].Content,
		"pd_proxy_host: \"nat.example\"\npd_proxy_port: 1\n")
}

func TestRolesOfLMCachePDThatCannotBeRendered(t *testing.T) {
	r := open(t, "lmcache-pd", ``)
	_, err := r.Render(lmcachePD(t, discovery.RoleBoth))
	require.ErrorContains(t, err, "sender and receiver")
	on := lmcachePD(t, discovery.RoleDecode)
	on.Endpoint.Attributes = nil
	_, err = r.Render(on)
	require.ErrorContains(t, err, "receiverInitPorts")
	assert.Contains(t, render(t, "lmcache-pd", `{"pd_backend_mode":"sync"}`,
		lmcachePD(t, discovery.RoleBoth)).Files[0].Content,
		`pd_role: "both"`)
}

func TestPartialChunksThatAreDiscardedAreToldOf(t *testing.T) {
	set := render(t, "lmcache-pd", `{"discard_partial_chunks":true,"lmcache_rpc_port":"10086"}`,
		lmcachePD(t, discovery.RolePrefill))
	assert.Equal(t, true, set.KVTransfer.Extra["discard_partial_chunks"])
	assert.Equal(t, "10086", set.KVTransfer.Extra["lmcache_rpc_port"])
	told := false
	for _, n := range set.Notes {
		told = told || n.Path == "config.discard_partial_chunks" && n.Text != "kv_connector_extra_config"
	}
	assert.True(t, told)
}
