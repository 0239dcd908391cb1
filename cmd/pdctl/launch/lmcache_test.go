// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

func lmcache(t *testing.T, settings string, change func(*launch.Target)) launch.Settings {
	t.Helper()
	e := engine(t, "http://10.0.0.1:8100", discovery.RolePrefill)
	target := launch.Target{Endpoint: e, Index: 1, Engines: []discovery.Endpoint{e}, Model: "m"}
	if change != nil {
		change(&target)
	}
	return render(t, "lmcache", settings, target)
}

// The design proposal's example becomes LMCache's file, its environment variable and vLLM's flag. Both roles get the
// same settings and the same seed.
func TestTheDesignExampleForTheEngines(t *testing.T) {
	settings := `{"serverEndpoints":["lmcache-0.lmcache.default.svc.cluster.local:8080"],"backendType":"redis",
		"redisConfig":{"host":"redis.default.svc.cluster.local","port":6379,"database":3,"username":"lmcache",
		"password":"lmcache-password"},
		"connectionTimeout":"10s","poolSize":10,"maxCacheSize":8589934592,"ttl":"10m","evictionPolicy":"lru"}`
	for _, role := range []discovery.Role{discovery.RolePrefill, discovery.RoleDecode} {
		set := lmcache(t, settings, func(target *launch.Target) {
			target.Endpoint.Role = role
			target.Resources = config.Resources{MaxMemory: "8Gi", MaxDisk: "100Gi", MaxBandwidth: "10Gi"}
		})
		assert.Equal(t, "vllm", set.Engine)
		assert.Equal(t, `{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both",`+
			`"kv_connector_extra_config":{"lmcache_rpc_port":"lmcache-`+role.String()+`-1"}}`, set.KVTransfer.JSON())
		require.Len(t, set.Files, 1)
		assert.Equal(t, "lmcache-"+role.String()+"-1.yaml", set.Files[0].Name)
		assert.Equal(t, `chunk_size: 256
local_cpu: true
max_local_cpu_size: 8
remote_url: "redis://redis.default.svc.cluster.local:6379/3"
remote_serde: "naive"
cache_policy: "LRU"
`, set.Files[0].Content)
		assert.Equal(
			t, []launch.EnvVar{{Name: "PYTHONHASHSEED", Value: "0"},
				{Name: "LMCACHE_CONFIG_FILE", Value: set.Files[0].Name}}, set.Env,
		)
		for _, path := range []string{
			"config.serverEndpoints", "config.redisConfig.username", "config.redisConfig.password",
			"config.connectionTimeout", "config.poolSize",
			"config.maxCacheSize", "config.ttl", "resources.maxDisk", "resources.maxBandwidth",
		} {
			assert.True(t, note(t, set, path).NoEffect, path)
		}
		for _, path := range []string{"config.backendType", "config.redisConfig.host", "config.redisConfig.port",
			"config.redisConfig.database", "config.evictionPolicy", "resources.maxMemory"} {
			assert.False(t, note(t, set, path).NoEffect, path)
		}
		assert.Contains(t, note(t, set, "config.redisConfig.password").Text, "LMCACHE_REMOTE_URL")
	}
}

func TestPasswordsAreNeverRendered(t *testing.T) {
	for _, settings := range []string{
		`{"backendType":"redis","redisConfig":{"host":"h","username":"u53r","password":"s3cret"}}`,
		`{"remote_url":"redis://u53r:s3cret@h:6379/1"}`,
		`{"lmcache.remote_url":"redis://u53r:s3c@ret@h:6379/1"}`,
	} {
		set := lmcache(t, settings, nil)
		raw, err := json.Marshal(set)
		require.NoError(t, err)
		assert.NotContains(t, string(raw), "s3c", settings)
		assert.NotContains(t, string(raw), "ret@", settings)
		assert.NotContains(t, string(raw), "u53r", settings)
		assert.Contains(t, set.Files[0].Content, `"redis://h:6379`, settings)
	}
}

func TestTheStoresOfLMCache(t *testing.T) {
	file := func(settings string, r config.Resources) string {
		return lmcache(t, settings, func(target *launch.Target) { target.Resources = r }).Files[0].Content
	}
	disk := file(`{"backendType":"disk","diskConfig":{"cacheDir":"/kv","maxDiskSize":107374182400},`+
		`"localConfig":{"maxMemoryMB":512},"evictionPolicy":"lfu"}`,
		config.Resources{MaxDisk: "50Gi", MaxMemory: "8Gi"})
	assert.Contains(t, disk, "local_disk: \"/kv\"\nmax_local_disk_size: 50\n", "the smaller of the two")
	assert.Contains(t, disk, "max_local_cpu_size: 0.5\n")
	assert.Contains(t, disk, `cache_policy: "LFU"`)
	assert.Contains(
		t, file(`{"backendType":"disk","diskConfig":{"cacheDir":"/kv"},"maxCacheSize":2147483648}`,
			config.Resources{}), "max_local_disk_size: 2\n",
	)
	assert.Contains(t, file(`{"backendType":"disk","diskConfig":{"cacheDir":"/kv"}}`, config.Resources{}),
		"max_local_disk_size: 10\n", "0 would keep nothing")
	assert.Contains(t, file(`{"backendType":"local","maxCacheSize":1073741824}`, config.Resources{}),
		"max_local_cpu_size: 1\n")
	assert.Contains(t, file(`{"serverEndpoints":["[2001:db8::1]:65432","b:1"]}`, config.Resources{}),
		`remote_url: "lm://[2001:db8::1]:65432"`)
	assert.Contains(t, file(`{"redisConfig":{"host":"2001:db8::1"}}`, config.Resources{}),
		`remote_url: "redis://[2001:db8::1]:6379"`)
	assert.Contains(
		t, file(`{"chunk_size":128,"lmcache.save_unfull_chunk":true,"remote_url":"mooncakestore://h:50051/"}`,
			config.Resources{}),
		"chunk_size: 128\nlocal_cpu: true\nmax_local_cpu_size: 5\nsave_unfull_chunk: true\nremote_url: "+
			"\"mooncakestore://h:50051/\"\n", "LMCache's own names win")
}

// Kthena's issue 1069: engines that share no store answer 200 and compute every prompt twice. A note says so before
// anything runs.
func TestStoresThatAreNotSharedAreTold(t *testing.T) {
	for settings, shared := range map[string]bool{
		`{}`:                      false,
		`{"backendType":"local"}`: false,
		`{"backendType":"disk","diskConfig":{"cacheDir":"/kv"}}`: false,
		`{"discard_partial_chunks":true}`:                        false,
		`{"redisConfig":{"host":"h"}}`:                           true,
		`{"serverEndpoints":["h:1"]}`:                            true,
		`{"lmcache.remote_url":"fs://h:0/kv"}`:                   true,
		`{"enable_p2p":true}`:                                    true,
	} {
		told := false
		for _, n := range lmcache(t, settings, nil).Notes {
			told = told || n.NoEffect && strings.Contains(n.Text, "shared")
		}
		assert.Equal(t, !shared, told, settings)
	}
}

// LMCacheMPConnector has one server beside the engines and no file.
func TestTheServerOfTheMultiprocessMode(t *testing.T) {
	for _, settings := range []string{
		`{"engineClass":"LMCacheMPConnector","serverEndpoints":["10.0.0.9:6555"],"localConfig":{"maxMemoryMB":2048},` +
			`"evictionPolicy":"lru","chunk_size":512}`,
		`{"lmcache.mp.host":"tcp://10.0.0.9","lmcache.mp.port":6555,"maxCacheSize":2147483648,` +
			`"lmcache.chunk_size":512}`,
	} {
		set := lmcache(t, settings, nil)
		assert.Equal(t, `{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both",`+
			`"kv_connector_extra_config":{"lmcache.mp.host":"tcp://10.0.0.9","lmcache.mp.port":6555}}`,
			set.KVTransfer.JSON())
		assert.Empty(t, set.Files)
		require.Len(t, set.Companions, 1)
		assert.False(t, set.Companions[0].PerEngine, "P and D share it")
		assert.Equal(t, "lmcache server --port 6555 --chunk-size 512 --l1-size-gb 2 --eviction-policy LRU "+
			"--host 0.0.0.0", strings.Join(set.Companions[0].Command, " "), "engines elsewhere must reach it")
		assert.Contains(t, set.Env, launch.EnvVar{Name: "PYTHONHASHSEED", Value: "0"})
	}
	set := lmcache(t, `{"engineClass":"LMCacheMPConnector","backendType":"redis","redisConfig":{"host":"h",`+
		`"password":"s3cret"},"save_unfull_chunk":true}`, nil)
	for _, path := range []string{"config.backendType", "config.redisConfig", "config.save_unfull_chunk"} {
		assert.True(t, note(t, set, path).NoEffect, path)
	}
}

// On a CPU the engines copy the KV, since the server can do so on an accelerator only. A server for one machine listens
// there only.
func TestTheServerOnACPU(t *testing.T) {
	set := lmcache(t, `{"engineClass":"LMCacheMPConnector","serverEndpoints":["127.0.0.1:6555"]}`,
		func(target *launch.Target) { target.CPU = true })
	require.Len(t, set.Companions, 1)
	assert.Equal(t, "lmcache server --port 6555 --chunk-size 256 --l1-size-gb 5 --eviction-policy LRU "+
		"--supported-transfer-mode engine_driven", strings.Join(set.Companions[0].Command, " "))
}

// The launch guide's config_path is not a setting of LMCache; the file's name is given in another way.
func TestTheLaunchGuidesConfigPath(t *testing.T) {
	set := lmcache(t, `{"config_path":"lmcache-config.yaml"}`, nil)
	n := note(t, set, "config.config_path")
	assert.True(t, n.NoEffect)
	assert.Contains(t, n.Text, "LMCACHE_CONFIG_FILE")
}

// A note names each key of the design proposal's YAML, with the value that it has there, and says what it became or
// that it has no effect.
func TestEveryKeyOfTheDesignExampleIsNamed(t *testing.T) {
	var settings map[string]any
	const example = `{"serverEndpoints":["lmcache-0.lmcache.default.svc.cluster.local:8080",
	"lmcache-1.lmcache.default.svc.cluster.local:8080"],"backendType":"redis",
		"redisConfig":{"host":"redis.default.svc.cluster.local","port":6379,"database":0,"username":"lmcache",
		"password":"lmcache-password"},
		"connectionTimeout":"10s","poolSize":10,"maxCacheSize":8589934592,"ttl":"10m","evictionPolicy":"lru"}`
	require.NoError(t, json.Unmarshal([]byte(example), &settings))
	set := lmcache(t, example, nil)
	for key, value := range settings {
		inner, ok := value.(map[string]any)
		if !ok {
			note(t, set, "config."+key)
		}
		for name := range inner {
			note(t, set, "config."+key+"."+name)
		}
	}
}
