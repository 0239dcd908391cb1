// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lmcacheScene is a pair over one store of chunks of 64 tokens; change gives D other settings, or both.
func lmcacheScene(t *testing.T, change func(p, d *enginesim.Config)) *simtest.Scene {
	dir := t.TempDir()
	return simtest.New(t, func(p, d *enginesim.Config) {
		for _, c := range []*enginesim.Config{p, d} {
			c.Connector, c.KVRole = "lmcache", enginesim.RoleBoth
			c.Extra = map[string]string{"store": dir, "hash_seed": "0", "chunk_size": "64"}
		}
		if change != nil {
			change(p, d)
		}
	})
}

// Chunks of 64: of 240 tokens three are whole, and the rest is computed.
func TestLMCacheLoadsWholeChunks(t *testing.T) {
	s := lmcacheScene(t, nil)
	body := simtest.Completion("one")
	got := s.Silent(body)
	s.Right(body, got)
	assert.EqualValues(t, 192, s.D.Stats().ExternalKVTransfer)
	assert.EqualValues(t, 48, s.D.Stats().LocalCompute)
	assert.EqualValues(t, 192, got.Get("usage.prompt_tokens_details.cached_tokens").Int())
	assert.Zero(t, s.P.Stats().ExternalKVTransfer)
	s.Clean()
}

// A prompt of whole chunks only: its last token is computed all the same, for the response starts from it.
func TestLMCacheComputesTheLastToken(t *testing.T) {
	s := lmcacheScene(t, nil)
	body := simtest.With(simtest.Completion("one"), simtest.Obj{"prompt": simtest.Prompt(128, "one")})
	s.Right(body, s.Silent(body))
	assert.EqualValues(t, 127, s.D.Stats().ExternalKVTransfer)
}

// What makes LMCache find nothing, in silence: all responses are right.
func TestLMCacheFindsNothing(t *testing.T) {
	for rule, change := range map[string]func(p, d *enginesim.Config){
		"another store":          func(_, d *enginesim.Config) { d.Extra["store"] += "/other" },
		"another PYTHONHASHSEED": func(_, d *enginesim.Config) { d.Extra["hash_seed"] = "1" },
		"no PYTHONHASHSEED": func(p, d *enginesim.Config) {
			delete(p.Extra, "hash_seed")
			delete(d.Extra, "hash_seed")
		},
		"chunks of another size": func(_, d *enginesim.Config) { d.Extra["chunk_size"] = "128" },
		"chunks longer than the prompt": func(p, d *enginesim.Config) {
			p.Extra["chunk_size"], d.Extra["chunk_size"] = "256", "256"
		},
		"a put that is not done":             func(p, _ *enginesim.Config) { p.Extra["put_delay"] = "10s" },
		"a prefill engine that only reads":   func(p, _ *enginesim.Config) { p.KVRole = enginesim.RoleConsumer },
		"a decode engine that only produces": func(_, d *enginesim.Config) { d.KVRole = enginesim.RoleProducer },
	} {
		t.Run(rule, func(t *testing.T) {
			s := lmcacheScene(t, change)
			body := simtest.Completion("one")
			got := s.Silent(body)
			s.Right(body, got)
			assert.Zero(t, s.D.Stats().ExternalKVTransfer)
			assert.EqualValues(t, 240, s.D.Stats().LocalCompute)
		})
	}
}

func TestLMCacheSettings(t *testing.T) {
	for rule, extra := range map[string]map[string]string{
		"no store":             {"chunk_size": "64"},
		"a chunk of no blocks": {"store": t.TempDir(), "chunk_size": "48"},
		"a chunk of none":      {"store": t.TempDir(), "chunk_size": "many"},
		"a delay of none":      {"store": t.TempDir(), "put_delay": "soon"},
	} {
		_, err := enginesim.Start(enginesim.Config{Connector: "lmcache", Extra: extra})
		assert.Error(t, err, rule)
	}
}
