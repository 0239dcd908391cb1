// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"go.uber.org/goleak"

	_ "github.com/pdkit/pdkit/connector/lmcachepd"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/lmcache"
	"github.com/pdkit/pdkit/connector/names"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// everyKey sets every setting of pdkit and of the design documents to a value that is not its default.
const everyKey = `{"settleTime":"30s","engineClass":"LMCacheConnectorV1",
	"serverEndpoints":["lmcache-0.lmcache.default.svc.cluster.local:8080",
	"lmcache-1.lmcache.default.svc.cluster.local:8080"],"backendType":"redis",
	"localConfig":{"maxMemoryMB":4096},"redisConfig":{"host":"redis.default.svc.cluster.local","port":6379,
	"database":2,"username":"lmcache","password":"lmcache-password"},
	"diskConfig":{"cacheDir":"/var/cache/kv","maxDiskSize":107374182400},"connectionTimeout":"10s","poolSize":10,
	"maxCacheSize":8589934592,"ttl":"10m","evictionPolicy":"lfu"}`

func harness() connectortest.Harness {
	return connectortest.Harness{
		Name: lmcache.Name, Config: json.RawMessage(everyKey),
	}
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness()) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(lmcache.Name), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness()) }

// The engine's class name stands for two protocols. Its settings decide, in all their spellings. Kthena's issue 1069
// began with one name for both.
func TestTheClassNameIsResolvedByItsSettings(t *testing.T) {
	for config, name := range map[string]string{
		``: "lmcache", `null`: "lmcache", `{}`: "lmcache",
		`{"backendType":"redis"}`: "lmcache", `{"enable_pd":false}`: "lmcache",
		`{"lmcache.enable_pd":false}`: "lmcache", `{"enable_nixl":"False"}`: "lmcache",
		`{"discard_partial_chunks":true,"lmcache_rpc_port":"10086"}`: "lmcache",
		`{"enable_pd":true}`: "lmcache-pd", `{"lmcache.enable_pd":true,"lmcache.pd_role":"sender"}`: "lmcache-pd",
		`{"enable_nixl":true}`: "lmcache-pd", `{"lmcache.enable_nixl":"True"}`: "lmcache-pd",
		`{"enable_xpyd":1}`: "lmcache-pd",
		`[true]`:            "lmcache", `{"enable_pd":`: "lmcache",
	} {
		assert.Equal(t, name, names.Resolve(lmcache.ClassV1, json.RawMessage(config)), config)
		assert.Equal(t, name, lmcache.Choose(json.RawMessage(config)), config)
	}
	assert.Equal(t, "lmcache", names.Resolve(lmcache.ClassMP, json.RawMessage(`{"lmcache.mp.port":6555}`)))
	assert.Equal(t, "lmcache-pd", play.Open(t, lmcache.ClassV1, `{"lmcache.enable_pd":true}`).Traits().Name)
}
