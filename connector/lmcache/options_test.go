// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/lmcache"
)

// This has the config of the design proposal's LMCache example, every key of its Go structs, LMCache's own names beside
// them, and the engine's kv_connector_extra_config of Kthena's issue 1069 and of the launch guide.
func TestEveryKeyOfTheDesignDocumentsIsRead(t *testing.T) {
	for rule, config := range map[string]string{
		"none": ``, "null": `null`, "empty": `{}`,
		"the YAML example": `{"serverEndpoints":["lmcache-0.lmcache.default.svc.cluster.local:8080",
		"lmcache-1.lmcache.default.svc.cluster.local:8080"],
			"backendType":"redis","redisConfig":{"host":"redis.default.svc.cluster.local","port":6379,"database":0,
			"username":"lmcache","password":"lmcache-password"},
			"connectionTimeout":"10s","poolSize":10,"maxCacheSize":8589934592,"ttl":"10m","evictionPolicy":"lru"}`,
		"the Go structs": everyKey,
		"LMCache's own names": `{"chunk_size":128,"remote_url":"redis://h:1",` +
			`"lmcache.save_unfull_chunk":"true","lmcache.nixl_backends":["UCX"],"extra_config":{"a":[1]}}`,
		"issue 1069":       `{"discard_partial_chunks":true,"lmcache_rpc_port":"10086"}`,
		"the launch guide": `{"config_path":"lmcache-config.yaml"}`,
		"the server's": `{"lmcache.mp.host":"tcp://localhost","lmcache.mp.port":6555,` +
			`"lmcache.mp.of_a_later_release":[1]}`,
		"the old transfer, switched off": `{"enable_nixl":false,"nixl_role":"sender","nixl_buffer_size":1073741824,` +
			`"nixl_enable_gc":true}`,
	} {
		_, err := connectortest.Open(lmcache.Name)(json.RawMessage(config))
		assert.NoError(t, err, rule)
	}
}

// The name means the shared store, whatever the class means.
func TestBadValuesAreRefusedAtTheirPath(t *testing.T) {
	play.Refuses(t, lmcache.Name, map[string]string{
		`{"settleTime":"-1s"}`:                                    "settleTime",
		`{"settleTime":5}`:                                        "settleTime",
		`{"engineClass":"NixlConnector"}`:                         "engineClass",
		`{"backendType":"memcached"}`:                             "backendType",
		`{"backendType":"redis"}`:                                 "redisConfig",
		`{"backendType":"disk"}`:                                  "diskConfig",
		`{"redisConfig":{"port":1}}`:                              "redisConfig.host",
		`{"redisConfig":{"host":"redis://h"}}`:                    "redisConfig.host",
		`{"redisConfig":{"host":"h","port":65536}}`:               "redisConfig.port",
		`{"redisConfig":{"host":"h","port":-1}}`:                  "redisConfig.port",
		`{"redisConfig":{"host":"h","database":-1}}`:              "redisConfig.database",
		`{"diskConfig":{"maxDiskSize":1}}`:                        "diskConfig.cacheDir",
		`{"diskConfig":{"cacheDir":"/a","maxDiskSize":-1}}`:       "diskConfig.maxDiskSize",
		`{"localConfig":{"maxMemoryMB":-1}}`:                      "localConfig.maxMemoryMB",
		`{"serverEndpoints":["lmcache-0"]}`:                       "serverEndpoints",
		`{"serverEndpoints":["lmcache-0:0"]}`:                     "serverEndpoints",
		`{"poolSize":-1}`:                                         "poolSize",
		`{"maxCacheSize":-1}`:                                     "maxCacheSize",
		`{"maxCacheSize":"8Gi"}`:                                  "maxCacheSize",
		`{"ttl":"-10m"}`:                                          "ttl",
		`{"connectionTimeout":"soon"}`:                            "connectionTimeout",
		`{"evictionPolicy":"fifo"}`:                               "evictionPolicy",
		`{"redisConfg":{"host":"h"}}`:                             "redisConfg",
		`{"chunk_size":"a"}`:                                      "chunk_size",
		`{"lmcache.local_cpu":2}`:                                 "lmcache.local_cpu",
		`{"max_local_cpu_size":"much"}`:                           "max_local_cpu_size",
		`{"remote_url":7}`:                                        "remote_url",
		`{"lmcache_worker_ports":"a,b"}`:                          "lmcache_worker_ports",
		`{"storage_plugins":[1]}`:                                 "storage_plugins",
		`{"lmcache.chunk_sizes":1}`:                               "lmcache.chunk_sizes",
		`{"chunk_size":1,"lmcache.chunk_size":2}`:                 "lmcache.chunk_size",
		`{"lmcache.enable_xpyd":false,"lmcache.enable_pd":false}`: "lmcache.enable_xpyd",
		`{"enable_nixl":true}`:                                    "enable_nixl",
		`{"lmcache.enable_nixl":"True"}`:                          "lmcache.enable_nixl",
		`{"lmcache.enable_pd":true}`:                              "lmcache.enable_pd … lmcache-pd",
		`{"enable_pd":true}`:                                      "enable_pd … lmcache-pd",
		`{"lmcache.chunk_sise":256}`:                              "lmcache.chunk_sise … chunk_size",
	})
}

func TestPasswordsAreInNoErrorText(t *testing.T) {
	_, err := connectortest.Open(lmcache.Name)(
		json.RawMessage(`{"redisConfig":{"host":"","port":-1,"database":-1,"username":"u53r","password":"s3cret"},` +
			`"remote_url":5,"poolSize":-1}`),
	)
	require.Error(t, err)
	assert.NotContains(t, err.Error(), "s3cret")
	assert.NotContains(t, err.Error(), "u53r")
}
