// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"github.com/pdkit/pdkit/cmd/pdctl/launch"
)

var ownOfRelay = []string{"member", "required", "required.peer", "required.blocks", "prefill",
	"prefill.do_remote_decode", "endsByLength"}

var everyConnector = []rules{
	{
		name:     "ascend-layerwise",
		settings: `{"callbackListen":"127.0.0.1:0","callbackURL":"http://gateway.example:8600","kvPort":36000}`,
		versions: []launch.Version{{Minor: 10, Patch: 1}, {Minor: 23}},
	},
	{name: "ascend-store", settings: everyOfSilentStores},
	{name: "flexkv", settings: everyOfSilentStores},
	{name: "hf3fs", settings: everyOfSilentStores},
	{name: "ucm", settings: everyOfSilentStores},
	{name: "http", settings: `{"requestTimeout":"7s","maxRetries":3,"kvTransferMethod":"implicit"}`},
	{name: "kvbm", settings: `{}`},
	{
		name: "lmcache",
		settings: `{"settleTime":"30s","engineClass":"LMCacheConnectorV1",
			"serverEndpoints":["lmcache-0.lmcache.default.svc.cluster.local:8080",
			"lmcache-1.lmcache.default.svc.cluster.local:8080"],"backendType":"redis",
			"localConfig":{"maxMemoryMB":4096},"redisConfig":{"host":"redis.default.svc.cluster.local","port":6379,
			"database":2,"username":"lmcache","password":"lmcache-password"},
			"diskConfig":{"cacheDir":"/var/cache/kv","maxDiskSize":107374182400},"connectionTimeout":"10s",
			"poolSize":10,"maxCacheSize":8589934592,"ttl":"10m","evictionPolicy":"lfu"}`,
		versions: []launch.Version{{Minor: 9}, {Minor: 32}},
	},
	{
		name: "lmcache-pd", settings: `{"notifyListen":"127.0.0.1:0","notifyTimeout":"7s","notifications":3}`,
		decode: []string{"receiverHost", "10.0.0.7", "receiverInitPorts", "8300,8301",
			"receiverAllocPorts", "8400,8401"},
		versions: []launch.Version{{Minor: 9}, {Minor: 32}},
	},
	{
		name: "mooncake",
		settings: `{"bootstrapPort":9998,"engineTTL":"7s","abortTimeout":"60s","num_workers":4,` +
			`"mooncake_protocol":"tcp","device_name":"mlx5_0","bootstrap_server_address":"10.0.0.9:8999",` +
			`"prefill_side_swa_replay":true}`,
		prefill: []string{"bootstrapURL", "http://prefill.example:8998"}, own: []string{"dispatch", "engineTTL"},
	},
	{
		name: "mooncake-ascend", settings: `{"leaseDuration":"90s","kvPort":36000}`,
		versions: []launch.Version{{Minor: 10, Patch: 1}, {Minor: 23}},
	},
	{name: "mooncake-hybrid", settings: `{"leaseDuration":"90s","kvPort":36000}`},
	{
		name: "mooncake-store",
		settings: `{"settleTime":"30s","mode":"embedded","metadata_server":"http://m:8080/metadata",` +
			`"master_server_address":"m:50052","protocol":"tcp",` +
			`"device_name":"mlx5_0","global_segment_size":"80GB","local_buffer_size":1073741824,` +
			`"enable_offload":true,"tenant_id":"a","local_hostname":"h","preferred_segment":"o:50053",` +
			`"load_async":false,"lookup_async":true,"lookup_rpc_port":7,"cache_prefix":"p","save_decode_cache":true,` +
			`"store_tp_size":4,"enable_store_tp_lcm":true,"prefill_tp_sizes":[4,2]}`,
	},
	{
		name: "moriio", settings: `{"handshakePort":7301,"notifyPort":62005,"tpSize":4,"deferTimeout":"90s"}`,
		versions: []launch.Version{{Minor: 27}, {Minor: 28}},
	},
	{
		name:     "moriio",
		settings: `{"mode":"read","handshakePort":7301,"notifyPort":62005,"tpSize":4,"deferTimeout":"90s"}`,
		versions: []launch.Version{{Minor: 27}, {Minor: 28}},
	},
	{
		name: "multi",
		settings: `{"connectors":[{"type":"nixl","config":{"leaseDuration":"9s"}},` +
			`{"kv_connector":"ExampleConnector","kv_role":"kv_both",` +
			`"kv_connector_extra_config":{"shared_storage_path":"local_storage"}}]}`,
	},
	{
		name: "nixl", // protocol means the same as networkType
		settings: `{"leaseDuration":"45s","clusterEndpoints":["10.0.0.9:2379"],"clusterId":"c","nodeId":"n",
			"networkInterface":"ib0","networkType":"rdma","port":7000,
			"rdmaConfig":{"deviceName":"mlx5_0","port":2,"queueDepth":128,"maxSge":4,"mtu":4096},
			"infinibandConfig":{"hcaName":"mlx5_1","port":2,"partitionKey":"0x8001","serviceLevel":3},
			"bufferSize":1048576,"connectionPoolSize":4,"maxConnections":5,"maxConcurrency":6,"keepAliveInterval":"7s",
			"maxMemoryPerNode":1073741824,"replicationFactor":2,"consistencyLevel":"strong","shardingStrategy":"hash",
			"hashFunction":"crc32","batchSize":9,"flushInterval":"11ms","compressionType":"lz4",
			"connectionTimeout":"3s","readTimeout":"4s","writeTimeout":"5s","failoverTimeout":"6s",
			"retryPolicy":"exponential"}`,
	},
	{
		name:     "nixl",
		settings: `{"bidirectional":true,"conversationTTL":"90s","conversationHeader":"X-Conversation"}`,
		own:      []string{"conversationHeader"}, versions: []launch.Version{{Minor: 32}, {Minor: 22}},
	},
	{
		name: "nixl-push", settings: `{"dispatch":"together","leaseDuration":"20s"}`,
		prefill: []string{"engineID", "pdkit-prefill", "sideChannelPort", "5600"}, own: []string{"dispatch"},
		versions: []launch.Version{{Minor: 32}, {Minor: 23}},
	},
	{
		name: "offload-p2p",
		settings: `{"dispatch":"serial","port":6000,"spec_name":"TieringOffloadingSpec",` +
			`"cpu_bytes_to_use":1073741824,"blocks_per_chunk":2,"eviction_policy":"arc",` +
			`"cache_policy_module_path":"m","offload_prompt_only":false,"self_describing_kv_events":true,` +
			`"secondary_tiers":[{"type":"p2p","num_threads":8},{"type":"fs","root_dir":"/kv"}]}`,
		prefill: []string{"p2pHost", "prefill.example", "p2pPort", "7780"},
	},
	{
		name: "p2pnccl",
		settings: `{"kv_buffer_size":"8e9","kv_port":"21001","kv_ip":"10.0.1.2","proxy_ip":"10.0.1.1",` +
			`"proxy_port":"30009","http_port":"20001","send_type":"PUT","mem_pool_size_gb":8,"nccl_num_channels":16,` +
			`"send_wait_timeout":9,"recv_store_timeout":9}`,
		prefill:  []string{"zmqAddress", "10.0.1.2:21001"},
		decode:   []string{"zmqAddress", "10.0.1.3:22001"},
		versions: []launch.Version{{Minor: 10}, {Minor: 22}},
	},
	{
		name: "pynccl",
		settings: `{"kv_buffer_size":"2e9","kv_port":"15000","kv_ip":"10.0.1.2","kv_rank":0,"kv_parallel_size":2,` +
			`"kv_buffer_device":"cpu"}`,
		versions: []launch.Version{{Minor: 7, Patch: 3}, {Minor: 10}},
	},
	{
		name: "relay",
		settings: `{"member":"engine.transfer","required":{"peer":"string","blocks":"list"},` +
			`"prefill":{"do_remote_decode":true},"endsByLength":true,"leaseDuration":"20s",` +
			`"kv_connector":"HouseConnector","kv_connector_module_path":"house.connector",` +
			`"kv_connector_extra_config":{"port":7000}}`,
		own: ownOfRelay,
	},
	{
		name: "sglang", settings: `{"bootstrapPort":9000,"prefillCap":true,"transferBackend":"nixl"}`,
		prefill: []string{"bootstrapPort", "9001", "dpSize", "4"},
	},
	{name: "sharedstorage", settings: `{"cacheHitThreshold":0.8,"sharedStoragePath":"/kv"}`},
	{name: "sharedstorage", settings: `{"shared_storage_path":"/kv"}`},
	{name: "tpu", settings: `{"leaseDuration":"90s","transferPort":9200,"noticePort":9700}`},
	{name: "trtllm", settings: `{"dispatch":"context-first","machineID":7,"authKey":"k"}`},
	{name: "trtllm", settings: `{"dispatch":"generation-first","machineID":7,"authKey":"k"}`},
}

const everyOfSilentStores = `{"settleTime":"30s","kv_connector_extra_config":{"a":"b"}}`
