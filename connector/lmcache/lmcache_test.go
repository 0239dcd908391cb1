// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"context"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	_ "github.com/pdkit/pdkit/connector/lmcachepd"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/uncarried"
	"github.com/pdkit/pdkit/connector/lmcache"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
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
		BadConfig: []json.RawMessage{
			json.RawMessage(`{"backendType":"carrier-pigeon"}`), json.RawMessage(`{"backendType":"redis"}`),
			json.RawMessage(`{"enable_pd":true}`),
			json.RawMessage(`{"lmcache.enable_nixl":"True"}`), json.RawMessage(`{"lmcache.chunk_sise":256}`),
			json.RawMessage(`{"chunk_size":"many"}`),
		},
	}
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness()) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(lmcache.Name), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness()) }

func session(t testing.TB, api connector.API, body string) *connector.Session {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	return contract.NewSession(r, "id", discovery.Endpoint{}, discovery.Endpoint{})
}

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
	c, err := connector.Open(
		config.Spec{Type: lmcache.ClassV1, Config: json.RawMessage(`{"lmcache.enable_pd":true}`)},
	)
	require.NoError(t, err)
	assert.Equal(t, "lmcache-pd", c.Traits().Name)
}

func TestTheNameMeansTheSharedStore(t *testing.T) {
	_, err := connectortest.Open(lmcache.Name)(json.RawMessage(`{"lmcache.enable_pd":true}`))
	faults := config.FieldErrors(err)
	require.Len(t, faults, 1)
	assert.Equal(t, "lmcache.enable_pd", faults[0].Path)
	assert.Contains(t, faults[0].Remedy, "lmcache-pd")
	c, err := connectortest.Open(lmcache.Name)(nil)
	require.NoError(t, err)
	assert.True(t, c.Traits().Handoff.ContentStore)
}

// By default there is no wait. A settle time is waited for in full, unless the request ends.
func TestSettleTimeIsWaitedForBetweenTheLegs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := session(t, connector.APICompletions, `{"prompt":"x"}`)
		c, err := lmcache.New(nil)
		require.NoError(t, err)
		wait, done := c.Expect(s)
		assert.Nil(t, wait)
		done(nil)

		settle := config.Duration(300 * time.Millisecond)
		c, err = lmcache.New(&lmcache.Options{SettleTime: &settle})
		require.NoError(t, err)
		wait, done = c.Expect(s)
		begun := time.Now()
		_, err = wait(t.Context())
		require.NoError(t, err)
		assert.Equal(t, 300*time.Millisecond, time.Since(begun))
		done(nil)

		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		_, err = wait(ctx)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

func TestRequests(t *testing.T) {
	c, err := lmcache.New(nil)
	require.NoError(t, err)
	for _, k := range []struct {
		api          connector.API
		body, member string
	}{
		{connector.APIChat, `{"messages":[],"n":2}`, ""},
		{connector.APICompletions, `{"prompt":["a","b"]}`, "prompt"},
		{connector.APICompletions, `{"prompt":"a","prompt_logprobs":1}`, "prompt_logprobs"},
		{connector.APISGLang, `{"text":"a"}`, "text"},
	} {
		assert.Equal(t, k.member, uncarried.Member(c, session(t, k.api, k.body).Request), k.body)
	}
}

// A thinking budget must be below max_tokens, which is 1 on this leg, and without it the prompt stays the same.
func TestThinkingBudgetIsNotSentToPrefill(t *testing.T) {
	c, err := lmcache.New(nil)
	require.NoError(t, err)
	s := session(t, connector.APIMessages, `{"messages":[],"thinking":{"type":"enabled","budget_tokens":1024},`+
		`"max_tokens":2048}`)
	leg := contract.NewPrefillLeg(s.Request, c.Traits())
	require.NoError(t, c.Prefill(t.Context(), s, leg))
	body, err := contract.Body(leg)
	require.NoError(t, err)
	assert.NotContains(t, string(body), "thinking")
}
