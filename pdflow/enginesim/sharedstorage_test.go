// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"maps"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

// stored are two engines with ExampleConnector over one folder.
func stored(t *testing.T, extra map[string]string) *scene {
	t.Helper()
	dir := t.TempDir()
	return newScene(t, func(p, d *enginesim.Config) {
		for _, c := range []*enginesim.Config{p, d} {
			c.Connector, c.KVRole, c.Extra = "sharedstorage", enginesim.RoleBoth, map[string]string{"shared_storage_path": dir}
			maps.Copy(c.Extra, extra)
		}
	})
}

func (s *scene) prefillOnly(path string, body obj) answer {
	s.t.Helper()
	a := s.post(s.t.Context(), s.p, path, with(body, obj{"max_tokens": 1, "stream": false}))
	require.Equal(s.t, 200, a.status, a.body)
	return a
}

// captures/example/01: whole blocks of the prompt less a token are loaded, the rest is computed.
func TestAStoredPromptIsLoaded(t *testing.T) {
	s := stored(t, nil)
	body := completion("a")
	assert.Equal(t, gjson.Null, s.prefillOnly(completions, body).get("kv_transfer_params").Type, "nothing is on the wire")
	a := s.post(t.Context(), s.d, completions, body)
	assert.Equal(t, s.alone(completions, body), a.text())
	assert.EqualValues(t, 224, a.get("usage.prompt_tokens_details.cached_tokens").Int())
	st := s.d.Stats()
	assert.EqualValues(t, 224, st.ExternalKVTransfer)
	assert.EqualValues(t, 16, st.LocalCompute)
	assert.Contains(t, s.get(s.d, "/metrics").body, `source="external_unspecified"} 224.0`)
	assert.NoError(t, s.p.CheckKV())
	assert.NoError(t, s.d.CheckKV())

	salted := with(completion("a"), obj{"cache_salt": "s"})
	assert.EqualValues(t, 224, s.post(t.Context(), s.d, completions, salted).get("usage.prompt_tokens_details.cached_tokens").Int(), "the salt is no part of the key (10)")

	s = stored(t, nil)
	s.prefillOnly(completions, body)
	s.post(t.Context(), s.d, completions, with(body, obj{"prompt": prompt(300, "a")}))
	assert.Zero(t, s.d.Stats().ExternalKVTransfer, "only a whole prompt is found (07)")
}

// captures/example/05 and 06.
func TestWhatTheFolderNeverHolds(t *testing.T) {
	for length, want := range map[int]int64{2: 0, 32: 0, 33: 0, 34: 32, 64: 32, 65: 0, 66: 64} {
		s := stored(t, nil)
		body := with(completion("x"), obj{"prompt": prompt(length, "x")})
		s.prefillOnly(completions, body)
		a := s.post(t.Context(), s.d, completions, body)
		assert.Equal(t, s.alone(completions, body), a.text())
		assert.Equal(t, want, s.d.Stats().ExternalKVTransfer, "a prompt of %d tokens", length)
	}
	s := stored(t, nil)
	assert.Equal(t, s.alone(completions, completion("y")), s.post(t.Context(), s.d, completions, completion("y")).text(), "without a prefill D computes all")
	assert.Zero(t, s.d.Stats().ExternalKVTransfer)
}

// captures/example/11.
func TestAPromptOfOneTokenKillsTheEngine(t *testing.T) {
	s := stored(t, nil)
	for _, e := range []*enginesim.Engine{s.p, s.d} {
		a := s.post(t.Context(), e, completions, obj{"model": "tiny", "prompt": []int{65}, "max_tokens": 1})
		assert.Equal(t, 500, a.status)
		assert.Equal(t, engineError, a.get("error.message").String())
		s.dies(e)
	}
}

func TestAnEngineWithAThresholdRefusesAColdPrompt(t *testing.T) {
	s := stored(t, map[string]string{"cache_hit_threshold": "1"})
	body := with(completion("a"), obj{"cache_hit_threshold": 0.9})
	cold := s.post(t.Context(), s.d, completions, body)
	assert.Equal(t, "cache_threshold", cold.get("choices.0.finish_reason").String())
	assert.Empty(t, cold.text())
	for _, path := range []string{completions, chat} {
		streamed := with(body, obj{"stream": true, "messages": []obj{{"role": "user", "content": prompt(200, "a")}}})
		a := s.post(t.Context(), s.d, path, streamed)
		assert.Contains(t, a.body, `"finish_reason":"cache_threshold"`)
	}
	assert.Zero(t, s.d.Stats().LocalCompute, "nothing was computed")
	s.prefillOnly(completions, with(body, obj{"cache_hit_threshold": 0}))
	assert.Equal(t, s.alone(completions, completion("a")), s.post(t.Context(), s.d, completions, body).text(), "224 of 240 tokens are enough")

	s = stored(t, nil)
	assert.Len(t, s.post(t.Context(), s.d, completions, body).text(), 24, "vLLM 0.32.0 does not know the member")
}
