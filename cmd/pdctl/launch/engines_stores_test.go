// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"github.com/pdkit/pdkit/config"
)

const designsLMCache = `{"serverEndpoints":["lmcache-0.lmcache.default.svc.cluster.local:8080"],` +
	`"backendType":"redis","redisConfig":{"host":"redis.default.svc.cluster.local",` +
	`"port":6379,"database":3,"username":"lmcache","password":"lmcache-password"},` +
	`"connectionTimeout":"10s","poolSize":10,"maxCacheSize":8589934592,"ttl":"10m",` +
	`"evictionPolicy":"lru"}`

const launchGuidesLMCache = `{"config_path":"lmcache-config.yaml","enable_nixl":true,"nixl_role":"sender",` +
	`"nixl_peer_host":"10.9.9.9","nixl_peer_port":55555,"nixl_buffer_size":2147483648,` +
	`"nixl_buffer_device":"cpu","nixl_enable_gc":true,"chunk_size":128}`

var storeEngines = []launched{
	{rule: "the design's example, for prefill", connector: "lmcache", settings: designsLMCache, index: 1,
		resources: config.Resources{MaxMemory: "8Gi", MaxDisk: "100Gi", MaxBandwidth: "10Gi"}, want: []string{
			"engine vllm", "env PYTHONHASHSEED=0 LMCACHE_CONFIG_FILE=lmcache-prefill-1.yaml",
			`kv LMCacheConnectorV1 kv_both connector_extra_config={"lmcache_rpc_port":"lmcache-prefill-1"}`,
			"notes resources.maxMemory config.backendType config.redisConfig.host config.redisConfig.port " +
				"config.redisConfig.database config.evictionPolicy",
			"idle config.maxCacheSize resources.maxDisk config.redisConfig.username config.redisConfig.password " +
				"config.serverEndpoints config.connectionTimeout config.poolSize config.ttl resources.maxBandwidth",
			`file lmcache-prefill-1.yaml
chunk_size: 256
local_cpu: true
max_local_cpu_size: 8
remote_url: "redis://redis.default.svc.cluster.local:6379/3"
remote_serde: "naive"
cache_policy: "LRU"`}, has: []string{"# config.redisConfig.password: ", "LMCACHE_REMOTE_URL"}},
	{rule: "the design's example, for decode", connector: "lmcache", settings: designsLMCache,
		engine: "decode http://10.0.0.1:8100", index: 1,
		resources: config.Resources{MaxMemory: "8Gi", MaxDisk: "100Gi", MaxBandwidth: "10Gi"}, want: []string{
			"engine vllm", "env PYTHONHASHSEED=0 LMCACHE_CONFIG_FILE=lmcache-decode-1.yaml",
			`kv LMCacheConnectorV1 kv_both connector_extra_config={"lmcache_rpc_port":"lmcache-decode-1"}`,
			"notes resources.maxMemory config.backendType config.redisConfig.host config.redisConfig.port " +
				"config.redisConfig.database config.evictionPolicy",
			"idle config.maxCacheSize resources.maxDisk config.redisConfig.username config.redisConfig.password " +
				"config.serverEndpoints config.connectionTimeout config.poolSize config.ttl resources.maxBandwidth",
			`file lmcache-decode-1.yaml
chunk_size: 256
local_cpu: true
max_local_cpu_size: 8
remote_url: "redis://redis.default.svc.cluster.local:6379/3"
remote_serde: "naive"
cache_policy: "LRU"`}, has: []string{"# config.redisConfig.password: ", "LMCACHE_REMOTE_URL"}},
	{rule: "the smaller of a size and its limit holds", connector: "lmcache",
		settings: `{"backendType":"disk","diskConfig":{"cacheDir":"/kv","maxDiskSize":107374182400},` +
			`"localConfig":{"maxMemoryMB":512},"evictionPolicy":"lfu"}`,
		resources: config.Resources{MaxDisk: "50Gi", MaxMemory: "8Gi"}, has: []string{
			"local_disk: \"/kv\"\n" +
				"max_local_disk_size: 50\n",
			"max_local_cpu_size: 0.5\n", `cache_policy: "LFU"`}},
	{rule: "a disk has maxCacheSize", connector: "lmcache",
		settings: `{"backendType":"disk","diskConfig":{"cacheDir":"/kv"},"maxCacheSize":2147483648}`,
		has:      []string{"max_local_disk_size: 2\n"}},
	{rule: "a disk of 0 would keep nothing", connector: "lmcache",
		settings: `{"backendType":"disk","diskConfig":{"cacheDir":"/kv"}}`,
		has:      []string{"max_local_disk_size: 10\n"}},
	{rule: "the engine's memory has maxCacheSize", connector: "lmcache",
		settings: `{"backendType":"local","maxCacheSize":1073741824}`, has: []string{"max_local_cpu_size: 1\n"}},
	{rule: "the first server is the store", connector: "lmcache",
		settings: `{"serverEndpoints":["[2001:db8::1]:65432","b:1"]}`,
		has:      []string{`remote_url: "lm://[2001:db8::1]:65432"`}},
	{rule: "Redis may have an IPv6 address", connector: "lmcache", settings: `{"redisConfig":{"host":"2001:db8::1"}}`,
		has: []string{`remote_url: "redis://[2001:db8::1]:6379"`}},
	{rule: "LMCache's own names win", connector: "lmcache",
		settings: `{"chunk_size":128,"lmcache.save_unfull_chunk":true,"remote_url":"mooncakestore://h:50051/"}`,
		has: []string{
			"chunk_size: 128\nlocal_cpu: true\nmax_local_cpu_size: 5\nsave_unfull_chunk: true\nremote_url: " +
				"\"mooncakestore://h:50051/\"\n"}},
	{rule: "a store that is not shared is told of, {}", connector: "lmcache", settings: "{}",
		has: []string{"nothing that is set here is shared"}},
	{rule: "a store that is not shared is told of, {backendType:local}", connector: "lmcache",
		settings: `{"backendType":"local"}`, has: []string{"nothing that is set here is shared"}},
	{rule: "a store that is not shared is told of, {backendType:disk,diskConfig:{cacheDir:/kv}}",
		connector: "lmcache", settings: `{"backendType":"disk","diskConfig":{"cacheDir":"/kv"}}`,
		has: []string{"nothing that is set here is shared"}},
	{rule: "a store that is not shared is told of, {discard_partial_chunks:true}", connector: "lmcache",
		settings: `{"discard_partial_chunks":true}`, has: []string{"nothing that is set here is shared"}},
	{rule: "a shared store, {redisConfig:{host:h}}", connector: "lmcache", settings: `{"redisConfig":{"host":"h"}}`,
		not: []string{"nothing that is set here is shared"}},
	{rule: "a shared store, {serverEndpoints:[h:1]}", connector: "lmcache", settings: `{"serverEndpoints":["h:1"]}`,
		not: []string{"nothing that is set here is shared"}},
	{rule: "a shared store, {lmcache.remote_url:fs://h:0/kv}", connector: "lmcache",
		settings: `{"lmcache.remote_url":"fs://h:0/kv"}`, not: []string{"nothing that is set here is shared"}},
	{rule: "a shared store, {enable_p2p:true}", connector: "lmcache", settings: `{"enable_p2p":true}`,
		not: []string{"nothing that is set here is shared"}},
	{rule: "one server beside all engines, by its class", connector: "lmcache",
		settings: `{"engineClass":"LMCacheMPConnector","serverEndpoints":["10.0.0.9:6555"],` +
			`"localConfig":{"maxMemoryMB":2048},"evictionPolicy":"lru","chunk_size":512}`, want: []string{
			"env PYTHONHASHSEED=0",
			`kv LMCacheMPConnector kv_both connector_extra_config={"lmcache.mp.host":"tcp://10.0.0.9",` +
				`"lmcache.mp.port":6555}`,
			`beside lmcache, one for each engine: false
lmcache server --port 6555 --chunk-size 512 --l1-size-gb 2 --eviction-policy LRU --host 0.0.0.0`},
		not: []string{"\nfile "}},
	{rule: "one server beside all engines, by LMCache's names", connector: "lmcache",
		settings: `{"lmcache.mp.host":"tcp://10.0.0.9","lmcache.mp.port":6555,"maxCacheSize":2147483648,` +
			`"lmcache.chunk_size":512}`, want: []string{
			"env PYTHONHASHSEED=0",
			`kv LMCacheMPConnector kv_both connector_extra_config={"lmcache.mp.host":"tcp://10.0.0.9",` +
				`"lmcache.mp.port":6555}`,
			`beside lmcache, one for each engine: false
lmcache server --port 6555 --chunk-size 512 --l1-size-gb 2 --eviction-policy LRU --host 0.0.0.0`},
		not: []string{"\nfile "}},
	{rule: "the server does not have the settings of the other class", connector: "lmcache",
		settings: `{"engineClass":"LMCacheMPConnector","backendType":"redis","redisConfig":{"host":"h",` +
			`"password":"s3cret"},"save_unfull_chunk":true}`,
		want: []string{"idle config.backendType config.redisConfig config.save_unfull_chunk"}},
	{rule: "on a CPU the engines copy the KV, and a server for one machine listens there only", connector: "lmcache",
		settings: `{"engineClass":"LMCacheMPConnector","serverEndpoints":["127.0.0.1:6555"]}`, cpu: true,
		want: []string{
			"beside lmcache, one for each engine: false\nlmcache server --port 6555 --chunk-size 256 " +
				"--l1-size-gb 5 --eviction-policy LRU --supported-transfer-mode engine_driven"}},
	{rule: "the launch guide's config_path is given in another way", connector: "lmcache",
		settings: `{"config_path":"lmcache-config.yaml"}`,
		want:     []string{"idle config.backendType config.config_path"},
		has:      []string{"# config.config_path: ", "LMCACHE_CONFIG_FILE"}, not: []string{"notes config.config_path"}},
	{rule: "every key of the design's example is named", connector: "lmcache",
		settings: `{"serverEndpoints":["lmcache-0:8080","lmcache-1:8080"],"backendType":"redis",` +
			`"redisConfig":{"host":"redis","port":6379,"database":0,"username":"lmcache",` +
			`"password":"lmcache-password"},"connectionTimeout":"10s","poolSize":10,` +
			`"maxCacheSize":8589934592,"ttl":"10m","evictionPolicy":"lru"}`, want: []string{
			"notes config.backendType config.redisConfig.host config.redisConfig.port " +
				"config.redisConfig.database config.evictionPolicy",
			"idle config.maxCacheSize config.redisConfig.username config.redisConfig.password " +
				"config.serverEndpoints config.connectionTimeout config.poolSize config.ttl"}},
	{rule: "a sender, as in LMCache's examples/disagg_prefill/1p1d at 02fe058c", connector: "lmcache-pd",
		settings: `{"notifyListen":"0.0.0.0:7500"}`,
		engine:   "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway:  "gateway.default.svc", want: []string{
			"engine vllm",
			"env PYTHONHASHSEED=0 UCX_TLS=cuda_ipc,cuda_copy,tcp LMCACHE_CONFIG_FILE=lmcache-pd-prefill-0.yaml",
			`kv LMCacheConnectorV1 kv_producer connector_extra_config={"discard_partial_chunks":false,` +
				`"lmcache_rpc_port":"producer0"}`,
			`file lmcache-pd-prefill-0.yaml
local_cpu: false
save_unfull_chunk: true
enable_pd: true
transfer_channel: "nixl"
pd_role: "sender"
pd_proxy_host: "gateway.default.svc"
pd_proxy_port: 7500
pd_buffer_size: 1073741824
pd_buffer_device: "cuda"
pd_allocation_timeout_sec: 10
nixl_backends: ["UCX"]`}},
	{rule: "a receiver, as in LMCache's examples/disagg_prefill/1p1d at 07e07869", connector: "lmcache-pd",
		settings: `{"notifyTimeout":"2500ms"}`,
		engine:   "decode http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway:  "gateway.default.svc", index: 2, cpu: true,
		resources: config.Resources{MaxMemory: "2Gi", MaxDisk: "1Gi", MaxBandwidth: "1G"}, want: []string{
			`kv LMCacheConnectorV1 kv_consumer connector_extra_config={"discard_partial_chunks":false,` +
				`"lmcache_rpc_port":"consumer2"}`,
			"notes resources.maxMemory config.notifyTimeout", "idle resources.maxDisk resources.maxBandwidth",
			`file lmcache-pd-decode-2.yaml
local_cpu: false
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
nixl_backends: ["UCX"]`}},
	{rule: "a receiver has a rank for each of its ports", connector: "lmcache-pd", settings: "{}",
		engine:  "decode http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway: "gateway.default.svc",
		beside:  []string{"decode http://10.0.0.8:8200 receiverInitPorts=1,2,3 receiverAllocPorts=4,5,6"},
		want:    []string{"args --enable-prompt-tokens-details --tensor-parallel-size 2"}},
	{rule: "a sender has as many ranks as the receivers", connector: "lmcache-pd", settings: "{}",
		engine:  "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway: "gateway.default.svc",
		beside:  []string{"decode http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401"},
		want:    []string{"args --enable-prompt-tokens-details --tensor-parallel-size 2"}},
	{rule: "one rank of a sender may send for all", connector: "lmcache-pd", settings: `{"notifications":1}`,
		engine:  "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway: "gateway.default.svc",
		beside:  []string{"decode http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401"},
		want:    []string{"args --enable-prompt-tokens-details"}},
	{rule: "a receiver with one port has one rank", connector: "lmcache-pd", settings: "{}",
		engine:  "decode http://10.0.0.7:8200 receiverInitPorts=1 receiverAllocPorts=2",
		gateway: "gateway.default.svc", want: []string{"args --enable-prompt-tokens-details"}},
	{rule: "the lookup leaves out a token that is P's own", connector: "lmcache-pd", settings: `{"retFirstTok":true}`,
		engine:  "decode http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway: "gateway.default.svc", has: []string{`"skip_last_n_tokens":1`}},
	{rule: "P's lookup leaves out none", connector: "lmcache-pd", settings: `{"retFirstTok":true}`,
		engine:  "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway: "gateway.default.svc", not: []string{`"skip_last_n_tokens"`}},
	{rule: "without P's token the lookup would miss the last chunk", connector: "lmcache-pd", settings: "{}",
		engine:  "decode http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway: "gateway.default.svc", not: []string{"skip_last_n_tokens"}},
	{rule: "the launch guide's names of 2025 become today's", connector: "lmcache-pd", settings: launchGuidesLMCache,
		engine:  "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway: "gateway.default.svc", want: []string{
			"notes config.chunk_size config.enable_nixl config.nixl_buffer_device config.nixl_buffer_size " +
				"config.nixl_role",
			"idle config.nixl_peer_host config.nixl_peer_port config.config_path config.nixl_enable_gc"},
		has: []string{
			"enable_pd: true\n", "pd_role: \"sender\"\n", "pd_buffer_size: 2147483648\n",
			"pd_buffer_device: \"cpu\"\n", "chunk_size: 128\n"},
		not: []string{"\nnixl_peer", "\nnixl_buffer", "\npd_peer"}},
	{rule: "the engine's role decides, and its attribute where it has one", connector: "lmcache-pd",
		settings: launchGuidesLMCache, engine: "decode http://10.0.0.7:8200 receiverAllocPorts=55556",
		gateway: "gateway.default.svc", want: []string{
			"notes config.chunk_size config.enable_nixl config.nixl_buffer_device config.nixl_buffer_size " +
				"config.nixl_peer_host config.nixl_peer_port",
			"idle config.nixl_role config.config_path config.nixl_enable_gc"}, has: []string{
			"pd_peer_host: \"10.9.9.9\"\n" +
				"pd_peer_init_port: [55555]\npd_peer_alloc_port: [55556]\n"}},
	{rule: "the attribute decides where the settings have a port too", connector: "lmcache-pd",
		settings: launchGuidesLMCache,
		engine:   "decode http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway:  "gateway.default.svc",
		want:     []string{"idle config.nixl_peer_port config.nixl_role config.config_path config.nixl_enable_gc"}},
	{rule: "the one port of the launch guide's receiver becomes two", connector: "lmcache-pd",
		settings: `{"enable_nixl":true,"nixl_role":"receiver","nixl_peer_host":"localhost","nixl_peer_port":55555,` +
			`"nixl_buffer_size":1073741824}`, engine: "decode http://10.0.0.7:8200", gateway: "gateway.default.svc",
		has: []string{
			"pd_peer_init_port: [55555]\npd_peer_alloc_port: [55655]\n",
			"pd_peer_alloc_port, which is not given, is 100 above"}},
	{rule: "without the gateway's host P sends notices where it listens, by default", connector: "lmcache-pd",
		settings: `{"notifyListen":""}`,
		engine:   "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		has: []string{
			"pd_proxy_host: \"127.0.0.1\"\n" +
				"pd_proxy_port: 8500\n"}},
	{rule: "without the gateway's host P sends notices where it listens, 0.0.0.0:7500", connector: "lmcache-pd",
		settings: `{"notifyListen":"0.0.0.0:7500"}`,
		engine:   "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		has: []string{
			"pd_proxy_host: \"127.0.0.1\"\n" +
				"pd_proxy_port: 7500\n"}},
	{rule: "without the gateway's host P sends notices where it listens, :7500", connector: "lmcache-pd",
		settings: `{"notifyListen":":7500"}`,
		engine:   "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		has: []string{
			"pd_proxy_host: \"127.0.0.1\"\n" +
				"pd_proxy_port: 7500\n"}},
	{rule: "without the gateway's host P sends notices where it listens, [::]:7500", connector: "lmcache-pd",
		settings: `{"notifyListen":"[::]:7500"}`,
		engine:   "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		has: []string{
			"pd_proxy_host: \"127.0.0.1\"\n" +
				"pd_proxy_port: 7500\n"}},
	{rule: "without the gateway's host P sends notices where it listens, 192.168.0.9:7500", connector: "lmcache-pd",
		settings: `{"notifyListen":"192.168.0.9:7500"}`,
		engine:   "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		has: []string{
			"pd_proxy_host: \"192.168.0.9\"\n" +
				"pd_proxy_port: 7500\n"}},
	{rule: "an engine on another machine does not find a loopback gateway", connector: "lmcache-pd", settings: "{}",
		engine: "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		has:    []string{"pd_proxy_host is loopback"}},
	{rule: "a gateway's address may be given", connector: "lmcache-pd",
		settings: `{"pd_proxy_host":"nat.example","pd_proxy_port":1}`,
		engine:   "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		has: []string{
			"pd_proxy_host: \"nat.example\"\n" +
				"pd_proxy_port: 1\n"}, not: []string{"pd_proxy_host is loopback"}},
	{rule: "a gateway's host that is known is no loopback", connector: "lmcache-pd", settings: "{}",
		engine:  "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway: "gateway.default.svc", not: []string{"pd_proxy_host is loopback"}},
	{rule: "an engine on the gateway's machine finds it", connector: "lmcache-pd", settings: "{}",
		engine: "prefill http://127.0.0.1:8100", not: []string{"pd_proxy_host is loopback"}},
	{rule: "the asynchronous backend knows no engine that is both", connector: "lmcache-pd",
		engine:  "both http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway: "gateway.default.svc", fails: "sender and receiver"},
	{rule: "the synchronous backend does", connector: "lmcache-pd", settings: `{"pd_backend_mode":"sync"}`,
		engine:  "both http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway: "gateway.default.svc", has: []string{`pd_role: "both"`}},
	{rule: "a receiver needs ports", connector: "lmcache-pd", engine: "decode http://10.0.0.7:8200",
		gateway: "gateway.default.svc", fails: "receiverInitPorts"},
	{rule: "partial chunks that are discarded are told of, and a name of a socket may be given",
		connector: "lmcache-pd", settings: `{"discard_partial_chunks":true,"lmcache_rpc_port":"10086"}`,
		engine:  "prefill http://10.0.0.7:8200 receiverInitPorts=8300,8301 receiverAllocPorts=8400,8401",
		gateway: "gateway.default.svc", want: []string{
			`kv LMCacheConnectorV1 kv_producer connector_extra_config={"discard_partial_chunks":true,` +
				`"lmcache_rpc_port":"10086"}`},
		has: []string{"# config.discard_partial_chunks: a prompt shorter than a chunk"}},
	{rule: "P finds what it has computed before, and a master on loopback serves one host",
		connector: "mooncake-store", beside: []string{"decode http://10.0.0.2:8200"}, want: []string{
			"env PYTHONHASHSEED=0 MOONCAKE_CONFIG_PATH=mooncake.json", "kv MooncakeStoreConnector kv_both",
			"notes config.master_server_address", "idle",
			`file mooncake.json
{
  "metadata_server": "P2PHANDSHAKE",
  "master_server_address": "127.0.0.1:50051",
  "protocol": "rdma",
  "device_name": ""
}`,
			`beside mooncake-master, one for each engine: false
mooncake_master --port 50051`}},
	{rule: "D only gets, and one host needs no other master", connector: "mooncake-store",
		engine: "decode http://10.0.0.2:8200",
		want:   []string{"kv MooncakeStoreConnector kv_consumer", "notes", "idle"}},
	{rule: "CPUs have TCP", connector: "mooncake-store", engine: "decode http://10.0.0.2:8200", cpu: true,
		has: []string{`"protocol": "tcp"`}},
	{rule: "all settings reach the file, the engine or the master", connector: "mooncake-store",
		settings: `{"metadata_server":"http://m:8081/metadata","master_server_address":"m:50052","protocol":"tcp",` +
			`"device_name":"mlx5_0","global_segment_size":"80GB","local_buffer_size":1073741824,` +
			`"enable_offload":true,"tenant_id":"a","local_hostname":"h","preferred_segment":"o:1",` +
			`"load_async":false,"cache_prefix":"p","prefill_tp_sizes":[4,2]}`, want: []string{
			"env PYTHONHASHSEED=0 MOONCAKE_CONFIG_PATH=mooncake.json MOONCAKE_REQUESTER_LOCAL_HOSTNAME=h " +
				"MOONCAKE_PREFERRED_SEGMENT=o:1",
			`kv MooncakeStoreConnector kv_both connector_extra_config={"cache_prefix":"p","load_async":false,` +
				`"prefill_tp_sizes":[4,2]}`,
			`file mooncake.json
{
  "metadata_server": "http://m:8081/metadata",
  "master_server_address": "m:50052",
  "protocol": "tcp",
  "device_name": "mlx5_0",
  "global_segment_size": "80GB",
  "local_buffer_size": 1073741824,
  "enable_offload": true,
  "tenant_id": "a"
}`,
			"beside mooncake-master, one for each engine: false\nmooncake_master --port 50052 " +
				"--enable_http_metadata_server=true --http_metadata_server_port=8081 --enable_offload=true " +
				"--enable_multi_tenants=true"}},
	{rule: "a limit of memory is each rank's segment", connector: "mooncake-store", resources: everyLimit,
		want: []string{"notes resources.maxMemory", "idle resources.maxDisk resources.maxBandwidth"},
		has:  []string{`"global_segment_size": 8589934592`}},
	{rule: "the engine's own segment wins", connector: "mooncake-store", settings: `{"global_segment_size":"1GB"}`,
		resources: everyLimit, want: []string{"idle resources.maxMemory resources.maxDisk resources.maxBandwidth"},
		has: []string{`"global_segment_size": "1GB"`}},
	{rule: "engines beside a store of its own give nothing", connector: "mooncake-store",
		settings: `{"mode":"standalone-store"}`, resources: everyLimit,
		want: []string{"idle resources.maxMemory resources.maxDisk resources.maxBandwidth"},
		has:  []string{`"global_segment_size": 0`}},
	{rule: "a limit of nothing is refused", connector: "mooncake-store", resources: config.Resources{MaxMemory: "0"},
		fails: "resources.maxMemory"},
	{rule: "each role has its own", connector: "ascend-store",
		settings: `{"kv_connector_extra_config":{"backend":"memcache"}}`, want: []string{
			"env PYTHONHASHSEED=0",
			`kv AscendStoreConnector kv_producer connector_extra_config={"backend":"memcache"}`}},
	{rule: "without consumer_is_to_load D loads nothing", connector: "ascend-store",
		settings: `{"kv_connector":"MooncakeConnectorStoreV1"}`, engine: "decode http://10.0.0.5:8100",
		want: []string{`kv MooncakeConnectorStoreV1 kv_consumer connector_extra_config={"consumer_is_to_load":true}`}},
	{rule: "what the settings say holds", connector: "ascend-store",
		settings: `{"kv_connector_extra_config":{"consumer_is_to_load":false}}`,
		engine:   "decode http://10.0.0.5:8100",
		want:     []string{`kv AscendStoreConnector kv_consumer connector_extra_config={"consumer_is_to_load":false}`}},
	{rule: "an engine of role prefill does both", connector: "flexkv",
		want: []string{"kv FlexKVConnectorV1 kv_both"}},
	{rule: "an engine of role decode does both", connector: "flexkv", engine: "decode http://10.0.0.1:8100",
		want: []string{"kv FlexKVConnectorV1 kv_both"}},
	{rule: "an engine of role both does both", connector: "flexkv", engine: "both http://10.0.0.1:8100",
		want: []string{"kv FlexKVConnectorV1 kv_both"}},
	{rule: "its metadata server runs beside the engines", connector: "hf3fs",
		has: []string{"\nbeside hf3fs-metadata,"}},
	{rule: "the newest engines have the class's new name, prefill", connector: "sharedstorage",
		settings: `{"sharedStoragePath":"/kv"}`, want: []string{
			"engine vllm", `kv ExampleConnector kv_both connector_extra_config={"shared_storage_path":"/kv"}`}},
	{rule: "the newest engines have the class's new name, decode", connector: "sharedstorage",
		settings: `{"sharedStoragePath":"/kv"}`, engine: "decode http://10.0.0.1:8100", want: []string{
			"engine vllm", `kv ExampleConnector kv_both connector_extra_config={"shared_storage_path":"/kv"}`}},
	{rule: "0.32 has it, prefill", connector: "sharedstorage", settings: `{"sharedStoragePath":"/kv"}`,
		version: "0.32.0", want: []string{
			"engine vllm", `kv ExampleConnector kv_both connector_extra_config={"shared_storage_path":"/kv"}`}},
	{rule: "0.32 has it, decode", connector: "sharedstorage", settings: `{"sharedStoragePath":"/kv"}`,
		engine: "decode http://10.0.0.1:8100", version: "0.32.0", want: []string{
			"engine vllm", `kv ExampleConnector kv_both connector_extra_config={"shared_storage_path":"/kv"}`}},
	{rule: "0.13 has it first, prefill", connector: "sharedstorage", settings: `{"sharedStoragePath":"/kv"}`,
		version: "0.13.0", want: []string{
			"engine vllm", `kv ExampleConnector kv_both connector_extra_config={"shared_storage_path":"/kv"}`}},
	{rule: "0.13 has it first, decode", connector: "sharedstorage", settings: `{"sharedStoragePath":"/kv"}`,
		engine: "decode http://10.0.0.1:8100", version: "0.13.0", want: []string{
			"engine vllm", `kv ExampleConnector kv_both connector_extra_config={"shared_storage_path":"/kv"}`}},
	{rule: "older ones have the old name, prefill", connector: "sharedstorage",
		settings: `{"sharedStoragePath":"/kv"}`, version: "0.12.0", want: []string{
			"engine vllm", `kv SharedStorageConnector kv_both connector_extra_config={"shared_storage_path":"/kv"}`}},
	{rule: "older ones have the old name, decode", connector: "sharedstorage",
		settings: `{"sharedStoragePath":"/kv"}`, engine: "decode http://10.0.0.1:8100", version: "0.12.0",
		want: []string{
			"engine vllm", `kv SharedStorageConnector kv_both connector_extra_config={"shared_storage_path":"/kv"}`}},
	{rule: "no setting is dropped in silence", connector: "sharedstorage", settings: `{"cacheHitThreshold":0.5}`,
		resources: config.Resources{MaxDisk: "1Gi"},
		want:      []string{"notes config.sharedStoragePath config.cacheHitThreshold", "idle resources.maxDisk"}},
	{rule: "an engine without connectors is refused", connector: "sharedstorage", version: "0.7.0", fails: "older"},
	{rule: "P listens where the gateway looks by default", connector: "offload-p2p", want: []string{
		"env PYTHONHASHSEED=0 VLLM_P2P_SIDE_CHANNEL_HOST=10.0.0.1 VLLM_P2P_SIDE_CHANNEL_PORT=7777",
		`kv OffloadingConnector kv_both connector_extra_config={"cpu_bytes_to_use":8589934592,` +
			`"secondary_tiers":[{"type":"p2p"}],"spec_name":"TieringOffloadingSpec"}`,
		"notes config.cpu_bytes_to_use", "idle"}},
	{rule: "two prefill engines with one port are told of", connector: "offload-p2p",
		settings: `{"cpu_bytes_to_use":1}`, engine: "prefill http://h:8101",
		beside: []string{"prefill http://h:8100 dpSize=2"}, want: []string{"notes attributes.p2pPort", "idle"}},
	{rule: "no port may be left", connector: "offload-p2p", settings: `{"port":65535}`,
		engine: "decode http://h:8200", beside: []string{"prefill http://h:8100"}, fails: "no port is left"},
	{rule: "the environment names host and port", connector: "offload-p2p",
		settings: `{"cpu_bytes_to_use":5,"block_size":64,"eviction_policy":"arc","offload_prompt_only":true,` +
			`"secondary_tiers":[{"type":"fs","root_dir":"/kv"},{"type":"p2p","host":"x","port":5710,` +
			`"num_threads":8}]}`, resources: config.Resources{MaxMemory: "1Gi", MaxDisk: "1Gi"}, want: []string{
			"env PYTHONHASHSEED=0 VLLM_P2P_SIDE_CHANNEL_HOST=10.0.0.1 VLLM_P2P_SIDE_CHANNEL_PORT=5710",
			`kv OffloadingConnector kv_both connector_extra_config={"block_size":64,"cpu_bytes_to_use":5,` +
				`"eviction_policy":"arc","offload_prompt_only":true,"secondary_tiers":[{"root_dir":"/kv",` +
				`"type":"fs"},{"num_threads":8,"type":"p2p"}],"spec_name":"TieringOffloadingSpec"}`,
			"idle resources.maxMemory resources.maxDisk"}},
	{rule: "a limit of memory is the first tier's size", connector: "offload-p2p",
		resources: config.Resources{MaxMemory: "1Gi"}, has: []string{`"cpu_bytes_to_use":1073741824`}},
	{rule: "0.23 has no tier", connector: "offload-p2p", version: "0.23.0", fails: "version"},
	{rule: "0.25 has other names", connector: "offload-p2p", version: "0.25.0",
		want: []string{"notes version config.cpu_bytes_to_use"}},
	{rule: "0.27 has other names", connector: "offload-p2p", version: "0.27.0",
		want: []string{"notes version config.cpu_bytes_to_use"}},
	{rule: "0.28 has the names of today", connector: "offload-p2p", version: "0.28.0",
		want: []string{"notes config.cpu_bytes_to_use"}},
	{rule: "0.32 has the names of today", connector: "offload-p2p", version: "0.32.0",
		want: []string{"notes config.cpu_bytes_to_use"}},
	{rule: "a faulty port is named", connector: "offload-p2p", engine: "prefill http://h:8100 p2pPort=x",
		fails: "attributes.p2pPort"},
}

// storePasswords are passwords of a store, which stand in settings in three ways.
var storePasswords = []launched{
	{rule: "a password is never rendered, from redisConfig", connector: "lmcache",
		settings: `{"backendType":"redis","redisConfig":{"host":"h","username":"u53r","password":"s3cret"}}`,
		has:      []string{`"redis://h:6379`}, not: []string{"s3c", "ret@", "u53r"}},
	{rule: "a password is never rendered, from remote_url", connector: "lmcache",
		settings: `{"remote_url":"redis://u53r:s3cret@h:6379/1"}`, has: []string{`"redis://h:6379`},
		not: []string{"s3c", "ret@", "u53r"}},
	{rule: "a password is never rendered, from lmcache.remote_url", connector: "lmcache",
		settings: `{"lmcache.remote_url":"redis://u53r:s3c@ret@h:6379/1"}`, has: []string{`"redis://h:6379`},
		not: []string{"s3c", "ret@", "u53r"}},
}
