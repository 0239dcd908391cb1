// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"strings"
)

// table has every rule; a test below checks that none is missing.
func table() []finding {
	return append(append(append(generalTable(), storesTable()...), peersTable()...), encodeTable()...)
}

func encodeTable() []finding {
	ec := func(class, role string, more string) string {
		return ` --ec-transfer-config={"ec_connector":"` + class + `","ec_role":"ec_` + role +
			`","ec_connector_extra_config":{` + more + `}}`
	}
	const ex, cpu, folder, nixlOn = "ECExampleConnector", "ECCPUConnector", `"shared_storage_path":"/ec"`,
		`"ec_enable_nixl":true`
	pair := two("", "NixlConnector")
	with := func(e, p string) []string { return []string{serve + e, pair[0] + p, pair[1]} }
	apart := func(host, e, p string) []string {
		return []string{"on:h1 " + host + serve + e, "on:h2 VLLM_NIXL_SIDE_CHANNEL_HOST=h2 " + pair[0] + p,
			"on:h2 VLLM_NIXL_SIDE_CHANNEL_PORT=5601 " + pair[1]}
	}
	good := with(ec(ex, "producer", folder), ec(ex, "consumer", folder))
	return []finding{
		{code: "encode-alone", engines: "a", wrong: with(ec(ex, "producer", folder), ""), right: good},
		{code: "encode-differs", wrong: with(ec(ex, "producer", folder), ec(cpu, "consumer", "")), right: good},
		{code: "encode-path-differs", wrong: with(ec(ex, "producer", folder), ec(ex, "consumer", "")), right: good},
		{code: "encode-path-local", wrong: apart("", ec(ex, "producer", ""), ec(ex, "consumer", "")),
			right: apart("", ec(ex, "producer", folder), ec(ex, "consumer", folder))},
		{code: "encode-loopback", engines: "a",
			wrong: apart("", ec(cpu, "producer", nixlOn), ec(cpu, "consumer", nixlOn)),
			right: apart("VLLM_EC_SIDE_CHANNEL_HOST=h1 ", ec(cpu, "producer", nixlOn), ec(cpu, "consumer", nixlOn))},
	}
}

func generalTable() []finding {
	nixl := two("", "NixlConnector")
	return []finding{
		{code: "settings-unread", severity: Warning, engines: "a",
			wrong: []string{"LMCACHE_CONFIG_FILE=gone.yaml " + seed + serve + kv("LMCacheConnectorV1", "both")},
			right: []string{"LMCACHE_CONFIG_FILE=pd.yaml " + seed + serve + kv("LMCacheConnectorV1", "producer")}},
		{code: "no-kv-transfer", engines: "b", wrong: []string{serve + kv("NixlConnector", "both"), serve},
			right: nixl},
		{code: "role-unknown", engines: "a", wrong: []string{serve + kv("NixlConnector", "prefill")}, right: nixl},
		{code: "roles", wrong: []string{nixl[0], nixl[0]}, right: nixl},
		{code: "roles", wrong: []string{nixl[1], nixl[1]}, right: nixl},
		{code: "connector-differs", wrong: []string{nixl[0], serve + kv("NixlPushConnector", "consumer")},
			right: nixl},
		{code: "engine-differs", wrong: []string{nixl[0], "sglang serve --model-path m --disaggregation-mode decode"},
			right: nixl},
		{code: "model-differs", wrong: []string{nixl[0], strings.Replace(nixl[1], " m ", " n ", 1)}, right: nixl},
		{code: "block-size-differs", wrong: []string{nixl[0] + " --block-size 16", nixl[1] + " --block-size=32"},
			right: []string{nixl[0] + " --block-size 16", nixl[1] + " --block-size=16"}},
		{code: "kv-cache-dtype-differs", wrong: []string{nixl[0] + " --kv-cache-dtype fp8", nixl[1]},
			right: []string{nixl[0] + " --kv-cache-dtype auto", nixl[1]}},
		{code: "dtype-differs", wrong: []string{nixl[0] + " --dtype float16", nixl[1] + " --dtype bfloat16"},
			right: []string{nixl[0] + " --dtype float16", nixl[1] + " --dtype float16"}},
		{code: "load-failure-hidden", severity: Warning,
			wrong: two("", "NixlConnector", `.kv_load_failure_policy="recompute"`),
			right: two("", "NixlConnector", `.kv_load_failure_policy="fail"`)},
		{code: "engine-id-twice", wrong: two("", "NixlConnector", `.engine_id="x"`),
			right: []string{serve + kv("NixlConnector", "producer", `.engine_id="x"`), nixl[1]}},
		{code: "mamba-layout", wrong: []string{nixl[0] + " --mamba-block-size 8", nixl[1] + " --mamba-block-size 8"},
			right: two("VLLM_SSM_CONV_STATE_LAYOUT=DS ", "NixlConnector")},

		{code: "gateway-connector", gateway: `{"type":"mooncake"}`, wrong: nixl, right: nixl,
			other: `{"type":"NixlConnector"}`},
		{code: "gateway-connector", gateway: `{"type":"sglang"}`, wrong: nixl, right: nixl, other: `{"type":"nixl"}`},
		{code: "gateway-connector", gateway: `{"type":"multi","config":{"connectors":[]}}`, wrong: nixl, right: nixl,
			other: `{"type":"nixl"}`},
		{code: "gateway-relays-nothing", gateway: `{"type":"http"}`, wrong: nixl, right: nixl,
			other: `{"type":"nixl"}`},
		{code: "gateway-connector",
			gateway: `{"type":"multi","config":{"connectors":[{"type":"nixl"},` +
				`{"kv_connector":"MooncakeStoreConnector"}]}}`,
			wrong: two("", "MultiConnector", "connectors=["+child("NixlConnector")+","+child("ExampleConnector")+"]"),
			right: two(seed, "MultiConnector", "connectors=["+child("NixlConnector")+","+
				child("MooncakeStoreConnector")+"]")},
		{code: "fallback-connector", severity: Warning,
			gateway: `{"type":"nixl","fallback":"connector","fallbackConnector":{"type":"sharedstorage"}}`,
			wrong:   nixl,
			right: two("", "MultiConnector", "connectors=["+child("NixlConnector")+","+
				child("ExampleConnector")+"]")},
		{code: "lease-short", engines: "a", gateway: `{"type":"nixl"}`,
			wrong: two("", "NixlConnector", "kv_lease_duration=10"),
			right: two("", "NixlConnector", "kv_lease_duration=30")},
		{code: "lease-short", engines: "a", gateway: `{"type":"nixl","config":{"leaseDuration":"2m"}}`, wrong: nixl,
			right: two("", "NixlConnector", "kv_lease_duration=120")},
		{code: "lease-short", engines: "a", gateway: `{"type":"nixl","timeouts":{"handoff":"45s"}}`, wrong: nixl,
			right: nixl, other: `{"type":"nixl","timeouts":{"handoff":"25s"}}`},
		{
			code: "lease-short", severity: Error, engines: "a", gateway: `{"type":"nixl"}`,
			wrong: two("@0.21.0 VLLM_NIXL_ABORT_REQUEST_TIMEOUT=20 ", "NixlConnector"),
			right: two("@0.21.0 ", "NixlConnector", "kv_lease_duration=10"), // that release does not read the setting
		},
		{code: "lease-short", engines: "a",
			gateway: `{"type":"multi","config":{"connectors":[{"type":"sharedstorage"},{"type":"nixl",` +
				`"config":{"leaseDuration":"2m"}}]}}`,
			wrong: two("", "MultiConnector", "connectors=["+child("ExampleConnector")+","+child("NixlConnector")+"]"),
			right: two("", "MultiConnector", "connectors=["+child("ExampleConnector")+","+child("NixlConnector")+"]"),
			other: `{"type":"multi","config":{"connectors":[{"type":"sharedstorage"},{"kv_connector":"NixlConnector",` +
				`"kv_connector_extra_config":{"kv_lease_duration":30}}]}}`},
		{code: "handoff-unlimited", severity: Warning, gateway: `{"type":"nixl","timeouts":{"handoff":"0"}}`,
			wrong: nixl, right: nixl, other: `{"type":"nixl"}`},
		{code: "push-engine-id", engines: "a", gateway: `{"type":"nixl-push"}`, wrong: two("", "NixlPushConnector"),
			right: []string{serve + kv("NixlPushConnector", "producer", `.engine_id="p"`), serve +
				kv("NixlPushConnector", "consumer")}},
		{code: "push-engine-id", engines: "a", gateway: `{"type":"nixl-push"}`, wrong: two("", "NixlPushConnector"),
			right: two("", "NixlPushConnector"), other: `{"type":"nixl-push","config":{"dispatch":"serial"}}`},

		{code: "version-differs", wrong: []string{"@0.32.0 " + nixl[0], "@0.31.0 " + nixl[1]},
			right: two("@0.32.0 ", "NixlConnector")},
		{code: "version-differs", severity: Warning, wrong: unlike("@0.32.0 ", "@0.31.0 ", "MooncakeConnector"),
			right: two("@0.32.0 ", "MooncakeConnector")},
		{code: "connector-renamed", wrong: two("@0.32.0 ", "SharedStorageConnector"),
			right: two("@0.32.0 ", "ExampleConnector")},
		{code: "connector-renamed", wrong: two("@0.12.0 ", "ExampleConnector"),
			right: two("@0.12.0 ", "SharedStorageConnector")},
		{code: "connector-too-new", wrong: two("@0.22.0 ", "NixlPushConnector"),
			right: two("@0.23.0 ", "NixlPushConnector")},
		{code: "connector-too-new",
			wrong: two("@0.23.0 "+seed, "OffloadingConnector", `secondary_tiers=[{"type":"p2p"}]`),
			right: two("@0.23.0 "+seed, "OffloadingConnector")},
		{code: "connector-removed", wrong: two("@0.11.0 ", "PyNcclConnector"),
			right: two("@0.10.2 ", "PyNcclConnector")},
		{code: "connector-removed", wrong: two("@0.32.0 VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 ", "P2pNcclConnector"),
			right: two("@0.22.0 VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 ", "P2pNcclConnector")},

		{code: "nixl-twice", engines: "a",
			wrong: []string{serve + kv("MultiConnector", "both", `connectors=[`+child("NixlConnector")+","+
				child("NixlPullConnector")+"]")},
			right: []string{serve + kv("MultiConnector", "both", `connectors=[`+child("NixlConnector")+","+
				child("ExampleConnector")+"]")}},
		{code: "nixl-loopback", engines: "a", wrong: []string{"on:h1 " + nixl[0], "on:h2 " + nixl[1]},
			right: []string{"on:h1 VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1 " + nixl[0],
				"on:h2 VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.2 " + nixl[1]}},
		{code: "nixl-loopback", engines: "a",
			wrong: []string{"on:h1 VLLM_NIXL_SIDE_CHANNEL_HOST=0.0.0.0 " + nixl[0], "on:h2 " + nixl[1]},
			right: []string{"on:h1 " + nixl[0], "on:h1 VLLM_NIXL_SIDE_CHANNEL_PORT=5700 " + nixl[1]}},
		{code: "nixl-port-twice", wrong: two("on:h1 ", "NixlConnector"),
			right: []string{"on:h1 " + nixl[0], "on:h1 VLLM_NIXL_SIDE_CHANNEL_PORT=5601 " + nixl[1]}},
		{code: "nixl-port-twice",
			wrong: []string{"on:h1 " + nixl[0] + " -dp 4", "on:h1 VLLM_NIXL_SIDE_CHANNEL_PORT=5603 " + nixl[1]},
			right: []string{"on:h1 " + nixl[0] + " -dp 4", "on:h1 VLLM_NIXL_SIDE_CHANNEL_PORT=5604 " + nixl[1]}},
		{code: "nixl-tp", wrong: []string{nixl[0] + " -tp 2", nixl[1] + " -tp 3"},
			right: []string{nixl[0] + " -tp 2", nixl[1] + " -tp 4"}},
		{code: "nixl-pp", engines: "a", wrong: []string{nixl[0] + " -pp 2", nixl[1]}, right: nixl},
		{code: "nixl-compat-off", severity: Warning, wrong: two("", "NixlConnector", "enforce_handshake_compat=false"),
			right: nixl},
	}
}

func storesTable() []finding {
	lm := func(more ...string) []string { return two(seed, "LMCacheConnectorV1", more...) }
	shared := lm(store)
	pd := func(sender, receiver string) []string {
		return []string{
			seed + "LMCACHE_CONFIG_FILE=pd.yaml " + sender + serve + kv("LMCacheConnectorV1", "producer"),
			seed + "LMCACHE_CONFIG_FILE=recv.yaml " + receiver + serve + kv("LMCacheConnectorV1", "consumer"),
		}
	}
	good := pd("", "")
	return []finding{
		{code: "lmcache-not-shared", gateway: `{"type":"lmcache"}`, wrong: lm(), right: shared},
		{code: "lmcache-remote-differs",
			wrong: unlikeBoth(seed+"LMCACHE_REMOTE_URL=redis://a:6379 ", seed+"LMCACHE_REMOTE_URL=redis://b:6379 ",
				"LMCacheConnectorV1"), right: shared},
		{code: "lmcache-chunk-size-differs", wrong: []string{"LMCACHE_CHUNK_SIZE=16 " + shared[0], shared[1]},
			right: shared},
		{code: "lmcache-serde-differs", wrong: []string{"LMCACHE_REMOTE_SERDE=cachegen " + shared[0], shared[1]},
			right: shared},
		{code: "lmcache-tp-differs", wrong: []string{shared[0] + " --tensor-parallel-size=2", shared[1]},
			right: shared},
		{code: "lmcache-tp-differs", wrong: []string{shared[0] + " --tensor-parallel-size=2", shared[1]},
			right: []string{strings.Replace(shared[0], " m ", " deepseek-ai/DeepSeek-V3.2 ", 1) + " -tp 2",
				strings.Replace(shared[1], " m ", " deepseek-ai/DeepSeek-V3.2 ", 1)}},
		{code: "lmcache-rpc-port-twice", wrong: []string{"on:h " + shared[0], "on:h " + shared[1]},
			right: []string{"on:h " + seed + serve + kv("LMCacheConnectorV1", "producer", store,
				`lmcache_rpc_port="p"`), "on:h " + seed + serve + kv("LMCacheConnectorV1", "consumer", store,
				`lmcache_rpc_port="d"`)}},
		{code: "lmcache-pd-behind-lmcache", gateway: `{"type":"lmcache"}`, wrong: good, right: good,
			other: `{"type":"lmcache-pd"}`},
		{code: "lmcache-pd-behind-lmcache", gateway: `{"type":"LMCacheConnectorV1"}`, wrong: good, right: good,
			other: `{"type":"LMCacheConnectorV1","config":{"enable_pd":true}}`},
		{code: "lmcache-pd-behind-lmcache", gateway: `{"type":"nixl"}`, wrong: good, right: good,
			other: `{"type":"lmcache-pd"}`},
		{code: "lmcache-store-behind-pd", gateway: `{"type":"lmcache-pd"}`, wrong: shared, right: shared,
			other: `{"type":"lmcache"}`},
		{code: "lmcache-notice-skipped", engines: "a", gateway: `{"type":"lmcache-pd"}`,
			wrong: pd("LMCACHE_PD_SKIP_PROXY_NOTIFICATION=true ", ""), right: good},
		{code: "lmcache-no-notice-address", engines: "a", wrong: pd("LMCACHE_PD_PROXY_HOST=null ", ""), right: good},
		{code: "lmcache-notice-port", engines: "a",
			gateway: `{"type":"lmcache-pd","config":{"notifyListen":"0.0.0.0:8600"}}`, wrong: good, right: good,
			other: `{"type":"lmcache-pd"}`},
		{code: "lmcache-notice-loopback", engines: "a",
			wrong: []string{"on:h1 LMCACHE_PD_PROXY_HOST=localhost " + good[0], "on:h2 " + good[1]},
			right: []string{"on:h1 " + good[0], "on:h2 " + good[1]}},
		{code: "lmcache-pd-role", engines: "a", wrong: pd("LMCACHE_PD_ROLE=receiver ", ""), right: good},
		{code: "lmcache-pd-receiver", engines: "b", wrong: []string{good[0], good[1] + " -tp 2"}, right: good},
		{code: "lmcache-pd-buffer", engines: "a", wrong: pd("LMCACHE_PD_BUFFER_DEVICE=null ", ""), right: good},
		{code: "lmcache-pd-forbidden", engines: "a", wrong: pd("LMCACHE_REMOTE_URL=lm://x:1 ", ""), right: good},
		{code: "lmcache-pd-partial-chunks", engines: "a",
			wrong: []string{seed + "LMCACHE_CONFIG_FILE=pd.yaml " + serve + kv("LMCacheConnectorV1", "producer",
				"discard_partial_chunks=true"), good[1]}, right: good},
		{code: "lmcache-old-names", severity: Warning, engines: "a",
			wrong: []string{seed + "LMCACHE_ENABLE_NIXL=True LMCACHE_NIXL_ROLE=sender " + serve +
				kv("LMCacheConnectorV1", "producer"), good[1]}, right: good},
		{code: "lmcache-mp-server",
			wrong: []string{serve + kv("LMCacheMPConnector", "producer", `lmcache.mp.port=5555`), serve +
				kv("LMCacheMPConnector", "consumer", `lmcache.mp.port=5556`)},
			right: two("", "LMCacheMPConnector", `lmcache.mp.port=5555`)},
		{code: "lmcache-mp-server",
			wrong: []string{"on:h1 " + serve + kv("LMCacheMPConnector", "producer",
				`lmcache.mp.host="tcp://localhost"`), "on:h2 " + serve + kv("LMCacheMPConnector", "consumer",
				`lmcache.mp.host="tcp://localhost"`)},
			right: unlike("on:h1 ", "on:h2 ", "LMCacheMPConnector", `lmcache.mp.host="tcp://s"`)},

		{code: "hash-seed-missing", wrong: two("", "MooncakeStoreConnector"),
			right: two(seed, "MooncakeStoreConnector")},
		{code: "hash-seed-missing", wrong: two("PYTHONHASHSEED=random ", "LMCacheConnectorV1", store), right: shared},
		{code: "hash-seed-missing", wrong: two("", "OffloadingConnector", `secondary_tiers=[{"type":"p2p"}]`),
			right: two("", "OffloadingConnector")},
		{code: "hash-seed-differs", wrong: unlike("PYTHONHASHSEED=1 ", "PYTHONHASHSEED=2 ", "MooncakeStoreConnector"),
			right: two(seed, "MooncakeStoreConnector")},
		{code: "hash-algorithm-differs",
			wrong: []string{seed + serve + kv("MooncakeStoreConnector", "producer") +
				" --prefix-caching-hash-algo sha256", seed + serve + kv("MooncakeStoreConnector", "consumer")},
			right: two(seed, "MooncakeStoreConnector")},
		{code: "storage-path-differs",
			wrong: []string{serve + kv("ExampleConnector", "both", `shared_storage_path="/kv"`), serve +
				kv("ExampleConnector", "both", `shared_storage_path="/kw"`)},
			right: two("", "ExampleConnector", `shared_storage_path="/kv"`)},
		{code: "storage-path-local",
			wrong: []string{"on:h1 " + serve + kv("ExampleConnector", "both"), "on:h2 " + serve +
				kv("ExampleConnector", "both", `shared_storage_path="/tmp"`)},
			right: unlikeBoth("on:h1 ", "on:h1 ", "ExampleConnector")},

		{code: "mooncake-master-differs",
			wrong: unlikeBoth(seed+"MOONCAKE_MASTER=a:50051 ", seed+"MOONCAKE_CONFIG_PATH=store.json ",
				"MooncakeStoreConnector"),
			right: two(seed+"MOONCAKE_CONFIG_PATH=store.json ", "MooncakeStoreConnector")},
		{code: "mooncake-tenant-differs",
			wrong: unlikeBoth(seed+"MOONCAKE_TENANT_ID=a ", seed, "MooncakeStoreConnector"),
			right: two(seed+"MOONCAKE_TENANT_ID=a ", "MooncakeStoreConnector")},
		{code: "mooncake-master-loopback", engines: "a",
			wrong: unlikeBoth("on:h1 "+seed+"MOONCAKE_MASTER=127.0.0.1:50051 ", "on:h2 "+seed+
				"MOONCAKE_MASTER=m:50051 ", "MooncakeStoreConnector"),
			right: unlikeBoth("on:h1 "+seed+"MOONCAKE_MASTER=m:50051 ", "on:h2 "+seed+
				"MOONCAKE_MASTER=m:50051 ", "MooncakeStoreConnector")},
		{code: "mooncake-prefix-differs",
			wrong: []string{seed + serve + kv("MooncakeStoreConnector", "both", `cache_prefix="a"`), seed + serve +
				kv("MooncakeStoreConnector", "both")}, right: two(seed, "MooncakeStoreConnector", `cache_prefix="a"`)},
		{code: "mooncake-port-twice",
			wrong: []string{"on:h " + serve + kv("MooncakeConnector", "producer"), "on:h " + serve +
				kv("MooncakeConnector", "producer"), serve + kv("MooncakeConnector", "consumer")},
			right: two("on:h ", "MooncakeConnector")},
		{code: "mooncake-port-gateway", severity: Warning, engines: "a", gateway: `{"type":"mooncake"}`,
			wrong: two("VLLM_MOONCAKE_BOOTSTRAP_PORT=9000 ", "MooncakeConnector"),
			right: two("VLLM_MOONCAKE_BOOTSTRAP_PORT=9000 ", "MooncakeConnector"),
			other: `{"type":"mooncake","config":{"bootstrapPort":9000}}`},
		{code: "mooncake-protocol-differs",
			wrong: []string{serve + kv("MooncakeConnector", "producer", `mooncake_protocol="tcp"`), serve +
				kv("MooncakeConnector", "consumer")}, right: two("", "MooncakeConnector", `mooncake_protocol="tcp"`)},
	}
}

func peersTable() []finding {
	const ids = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 "
	p2p := two(ids, "P2pNcclConnector")
	ports := []string{"http_port=1", "handshake_port=2", "notify_port=3"}
	moriio := two("", "MoRIIOConnector", ports...)
	tier := `secondary_tiers=[{"type":"p2p"}]`
	sgl := []string{"python3 -m sglang.launch_server --model-path m --disaggregation-mode prefill",
		"python3 -m sglang.launch_server --model-path m --disaggregation-mode decode"}
	moon, ascend := two("", "MooncakeConnector"), two("", "MooncakeConnectorV1")
	mamba := two("VLLM_SSM_CONV_STATE_LAYOUT=DS ", "NixlConnector")
	for i := range mamba {
		mamba[i] = strings.Replace(mamba[i], "serve m", "serve org/Jamba-1", 1)
	}
	jamba := two("VLLM_SSM_CONV_STATE_LAYOUT=DS ", "MoRIIOConnector", ports...)
	for i := range jamba {
		jamba[i] = strings.Replace(jamba[i], "serve m", "serve org/Jamba-1", 1)
	}
	return []finding{
		{code: "mamba-tp", wrong: []string{"@0.19.0 " + mamba[0] + " -tp 2", mamba[1]},
			right: []string{mamba[0] + " -tp 2", mamba[1] + " -tp 2"}},
		{code: "mamba-tp", severity: Warning, wrong: []string{"@0.32.0 " + mamba[0] + " -tp 2", mamba[1]},
			right: []string{mamba[0] + " -tp 2", mamba[1] + " -tp 2"}},
		{code: "mamba-tp", wrong: []string{jamba[0] + " -tp 2", jamba[1]},
			right: []string{jamba[0] + " -tp 2", jamba[1] + " -tp 2"}},
		{code: "nccl-tp-differs", wrong: []string{p2p[0] + " -tp=2", p2p[1]}, right: p2p},
		{code: "p2pnccl-request-ids", wrong: two("@0.22.0 ", "P2pNcclConnector"),
			right: two("@0.13.0 ", "P2pNcclConnector")},
		{code: "p2pnccl-request-ids", wrong: two("", "P2pNcclConnector"), right: p2p},
		{code: "p2pnccl-port-twice", wrong: []string{"on:h " + p2p[0], "on:h " + p2p[1]},
			right: []string{"on:h " + p2p[0], "on:h " + ids + serve + kv("P2pNcclConnector", "consumer",
				`.kv_port="21001"`)}},
		{code: "pynccl-ranks", wrong: two("", "PyNcclConnector", ".kv_rank=0"),
			right: []string{serve + kv("PyNcclConnector", "producer", ".kv_rank=0"), serve + kv("PyNcclConnector",
				"consumer", ".kv_rank=1")}},
		{code: "moriio-mode-differs",
			wrong: []string{serve + kv("MoRIIOConnector", "producer", append(ports, "read_mode=true")...), moriio[1]},
			right: moriio},
		{code: "moriio-mode-differs", gateway: `{"type":"moriio","config":{"mode":"read"}}`, wrong: moriio,
			right: two("", "MoRIIOConnector", append(ports, "read_mode=true")...)},
		{code: "moriio-ports", engines: "a",
			wrong: []string{serve + kv("MoRIIOConnector", "producer", ports[:2]...), moriio[1]}, right: moriio},
		{code: "offload-p2p-missing", gateway: `{"type":"offload-p2p"}`, wrong: two(seed, "OffloadingConnector"),
			right: two(seed, "OffloadingConnector", tier)},
		{code: "offload-old-keys", gateway: `{"type":"offload-p2p"}`,
			wrong: two("@0.27.0 "+seed, "OffloadingConnector", tier),
			right: two("@0.28.0 "+seed, "OffloadingConnector", tier)},
		{code: "offload-port-gateway", severity: Warning, engines: "a", gateway: `{"type":"offload-p2p"}`,
			wrong: two(seed, "OffloadingConnector", tier),
			right: two(seed+"VLLM_P2P_SIDE_CHANNEL_PORT=7777 ", "OffloadingConnector", tier)},
		{code: "offload-loopback", engines: "a",
			wrong: unlike("on:h1 "+seed, "on:h2 "+seed, "OffloadingConnector", tier),
			right: unlike("on:h1 VLLM_P2P_SIDE_CHANNEL_HOST=h1 "+seed, "on:h2 "+seed, "OffloadingConnector",
				tier)},
		{code: "offload-port-twice", wrong: two("on:h "+seed, "OffloadingConnector", tier),
			right: unlike("on:h "+seed, "on:h VLLM_P2P_SIDE_CHANNEL_PORT=5711 "+seed, "OffloadingConnector",
				tier)},

		{code: "pair-sizes", wrong: []string{moon[0] + " -tp 4", moon[1] + " -tp 6"},
			right: []string{moon[0] + " -tp 4", moon[1] + " -tp 8"}},
		{code: "pair-sizes", wrong: []string{ascend[0] + " -tp 4", ascend[1] + " -tp 8"},
			right: []string{ascend[0] + " -tp 8", ascend[1] + " -tp 4"}},
		{code: "pair-sizes", wrong: []string{moriio[0] + " -tp 4", moriio[1] + " -tp 6"},
			right: []string{moriio[0] + " -tp 4", moriio[1] + " -tp 2"}},
		{code: "pair-sizes", wrong: []string{p2p[0] + " -pp=2", p2p[1]},
			right: []string{p2p[0] + " -pp=2", p2p[1] + " -pp=2"}},
		{code: "pair-sizes", wrong: []string{sgl[0], sgl[1] + " --pp-size 2"},
			right: []string{sgl[0] + " --pp-size 2", sgl[1]}},
		{code: "pair-sizes", engines: "ac",
			wrong: []string{moon[0] + " -tp 4", moon[1] + " -tp 8", moon[1] + " -tp 3"},
			right: []string{moon[0] + " -tp 4", moon[1] + " -tp 8", moon[1] + " -tp 1"}},
		{ // a number of notices says that not every rank sends
			code: "pair-sizes", severity: Error, engines: "ab", gateway: `{"type":"lmcache-pd"}`,
			other: `{"type":"lmcache-pd","config":{"notifications":1}}`,
			wrong: []string{seed + serve + kv("LMCacheConnectorV1", "producer") + " -tp 2", seed + serve +
				kv("LMCacheConnectorV1", "consumer")},
			right: []string{seed + serve + kv("LMCacheConnectorV1", "producer") + " -tp 2", seed + serve +
				kv("LMCacheConnectorV1", "consumer")},
		},
		{code: "sglang-mode", engines: "a", gateway: `{"type":"sglang"}`,
			wrong: []string{"sglang serve --model-path m"}, right: sgl},
		{code: "sglang-backend-differs", wrong: []string{sgl[0] + " --disaggregation-transfer-backend nixl", sgl[1]},
			right: []string{sgl[0] + " --disaggregation-transfer-backend mooncake", sgl[1]}},
		{code: "page-size-differs", wrong: []string{sgl[0] + " --page-size 64", sgl[1]}, right: sgl},
		{code: "sglang-port-gateway", severity: Warning, engines: "a",
			gateway: `{"type":"sglang","config":{"bootstrapPort":9000}}`, wrong: sgl,
			right: []string{sgl[0] + " --disaggregation-bootstrap-port=9000", sgl[1]}},
		{code: "sglang-port-twice", wrong: []string{"on:h " + sgl[0], "on:h " + sgl[0], "on:h " + sgl[1]},
			right: []string{"on:h " + sgl[0], "on:h " + sgl[0] + " --disaggregation-bootstrap-port 8999", "on:h " +
				sgl[1]}},
		{code: "trtllm-transceiver", engines: "a",
			wrong: []string{"trtllm-serve m", "trtllm-serve serve m --extra_llm_api_options ucx.yaml"},
			right: []string{"trtllm-serve m --extra_llm_api_options=ucx.yaml", "trtllm-serve serve m " +
				"--extra_llm_api_options ucx.yaml"}},
		{code: "trtllm-transceiver-differs",
			wrong: []string{"trtllm-serve m --config nixl.yaml", "trtllm-serve m --config ucx.yaml"},
			right: []string{"trtllm-serve m --config ucx.yaml", "trtllm-serve m --config ucx.yaml"}},
	}
}
