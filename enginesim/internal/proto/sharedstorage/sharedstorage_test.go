// SPDX-License-Identifier: Apache-2.0

package sharedstorage_test

import (
	"maps"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stored are two engines with ExampleConnector over one folder.
func stored(t *testing.T, extra map[string]string, more ...func(p, d *enginesim.Config)) *simtest.Scene {
	t.Helper()
	dir := t.TempDir()
	return simtest.New(t, append([]func(p, d *enginesim.Config){func(p, d *enginesim.Config) {
		for _, c := range []*enginesim.Config{p, d} {
			c.Connector, c.KVRole, c.Extra = "sharedstorage", enginesim.RoleBoth,
				map[string]string{"shared_storage_path": dir}
			maps.Copy(c.Extra, extra)
		}
	}}, more...)...)
}

// docs/protocols/sharedstorage.md, recording 01: whole blocks of the prompt less a token are loaded, the rest is
// computed.
func TestAStoredPromptIsLoaded(t *testing.T) {
	s := stored(t, nil)
	body := simtest.Completion("a")
	assert.Equal(t, gjson.Null, s.PrefillOnly(body).Get("kv_transfer_params").Type, "nothing is on the wire")
	a := s.Ask(s.D, body)
	s.Right(body, a)
	assert.EqualValues(t, 224, a.Get("usage.prompt_tokens_details.cached_tokens").Int())
	st := s.D.Stats()
	assert.EqualValues(t, 224, st.ExternalKVTransfer)
	assert.EqualValues(t, 16, st.LocalCompute)
	assert.Contains(t, s.Get(s.D, "/metrics").Body, `source="external_unspecified"} 224.0`)
	s.Clean()

	a = s.Ask(s.D, simtest.With(body, simtest.Obj{"cache_salt": "s"}))
	assert.EqualValues(t, 224, a.Get("usage.prompt_tokens_details.cached_tokens").Int(),
		"the salt is no part of the key (10)")

	s = stored(t, nil)
	s.PrefillOnly(body)
	s.Ask(s.D, simtest.With(body, simtest.Obj{"prompt": simtest.Prompt(300, "a")}))
	assert.Zero(t, s.D.Stats().ExternalKVTransfer, "only a whole prompt is found (07)")
}

// docs/protocols/sharedstorage.md, recordings 05 and 06.
func TestWhatTheFolderNeverHolds(t *testing.T) {
	for length, want := range map[int]int64{2: 0, 32: 0, 33: 0, 34: 32, 64: 32, 65: 0, 66: 64} {
		s := stored(t, nil)
		body := simtest.With(simtest.Completion("x"), simtest.Obj{"prompt": simtest.Prompt(length, "x")})
		s.PrefillOnly(body)
		a := s.Ask(s.D, body)
		s.Right(body, a)
		assert.Equal(t, want, s.D.Stats().ExternalKVTransfer, "a prompt of %d tokens", length)
	}
	s := stored(t, nil)
	assert.Equal(t, s.Alone(simtest.Completion("y")),
		s.Ask(s.D, simtest.Completion("y")).Text(), "without a prefill D computes all")
	assert.Zero(t, s.D.Stats().ExternalKVTransfer)
}

// docs/protocols/sharedstorage.md, recording 11.
func TestAPromptOfOneTokenKillsTheEngine(t *testing.T) {
	s := stored(t, nil, simtest.OwnPorts(t))
	for _, e := range []*enginesim.Engine{s.P, s.D} {
		a := s.Ask(e, simtest.Obj{"model": "tiny", "prompt": []int{65}, "max_tokens": 1})
		s.Kills(e, a)
	}
}

func TestAnEngineWithAThresholdRefusesAColdPrompt(t *testing.T) {
	s := stored(t, map[string]string{"cache_hit_threshold": "1"})
	body := simtest.With(simtest.Completion("a"), simtest.Obj{"cache_hit_threshold": 0.9})
	cold := s.Ask(s.D, body)
	assert.Equal(t, "cache_threshold", cold.Get("choices.0.finish_reason").String())
	assert.Empty(t, cold.Text())
	for _, path := range []string{simtest.Completions, simtest.Chat} {
		streamed := simtest.With(body, simtest.Obj{"stream": true,
			"messages": []simtest.Obj{{"role": "user", "content": simtest.Prompt(200, "a")}}})
		a := s.Post(t.Context(), s.D, path, streamed)
		assert.Contains(t, a.Body, `"finish_reason":"cache_threshold"`)
	}
	assert.Zero(t, s.D.Stats().LocalCompute, "nothing was computed")
	s.PrefillOnly(simtest.With(body, simtest.Obj{"cache_hit_threshold": 0}))
	assert.Equal(t, s.Alone(simtest.Completion("a")), s.Ask(s.D, body).Text(), "224 of 240 tokens are enough")

	s = stored(t, nil)
	assert.Len(t, s.Ask(s.D, body).Text(), 24, "vLLM 0.32.0 does not know the member")
}
