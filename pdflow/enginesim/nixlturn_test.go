// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func bothWays(p, d *enginesim.Config) {
	p.Extra = map[string]string{"bidirectional_kv_xfer": "true"}
	d.Extra = p.Extra
}

// firstTurn runs a turn over both engines, and gives D's handoff and the prompt
// of the next turn.
func (s *scene) firstTurn(body obj) (back obj, next string) {
	s.t.Helper()
	a := s.decode(completions, body, s.prefill(completions, body))
	require.Equal(s.t, 200, a.status, a.body)
	require.NoError(s.t, json.Unmarshal([]byte(a.get("kv_transfer_params").Raw), &back), a.body)
	return back, body["prompt"].(string) + a.text() + " and what follows from that?"
}

func (s *scene) prefillWith(body, params obj) obj {
	s.t.Helper()
	a := s.post(s.t.Context(), s.p, completions, with(body, obj{"max_tokens": 1, "kv_transfer_params": params}))
	require.Equal(s.t, 200, a.status, a.body)
	h := obj{}
	require.NoError(s.t, json.Unmarshal([]byte(a.get("kv_transfer_params").Raw), &h))
	return h
}

// restartP empties P's prefix cache, in which it would find the first prompt.
func (s *scene) restartP() {
	s.t.Helper()
	require.NoError(s.t, s.p.Restart())
	s.http.CloseIdleConnections()
}

func TestKVOfATurnGoesBackToPrefill(t *testing.T) {
	s := newScene(t, bothWays)
	back, next := s.firstTurn(completion("turn"))
	assert.Equal(t, true, back["do_remote_decode"])
	assert.Equal(t, false, back["do_remote_prefill"])
	assert.EqualValues(t, 240+24-1, back["remote_num_tokens"], "the last token's KV was not computed")
	assert.NotNil(t, back["remote_blocks_expiry_time"])
	assert.NoError(t, s.d.CheckKV(), "what is kept for a next turn is no leak")
	assert.Positive(t, s.d.Stats().PinnedBlocks)

	s.restartP()
	body := with(completion("turn"), obj{"prompt": next})
	h := s.prefillWith(body, back)
	assert.EqualValues(t, 263, s.p.Stats().ExternalKVTransfer)
	assert.Zero(t, s.d.Stats().PinnedBlocks, "D lets go once it was read")
	a := s.decode(completions, body, h)
	assert.Equal(t, s.alone(completions, body), a.text())
	assert.NoError(t, s.p.CheckKV())
	assert.NoError(t, s.d.CheckKV())
}

// P compares no tokens: a prompt that is not the last turn's continuation is
// answered wrongly, with 200.
func TestKVOfATurnIsTakenByPosition(t *testing.T) {
	s := newScene(t, bothWays)
	back, next := s.firstTurn(completion("turn"))
	s.restartP()
	body := with(completion("turn"), obj{"prompt": "X" + next[1:]})
	a := s.decode(completions, body, s.prefillWith(body, back))
	assert.Equal(t, 200, a.status)
	assert.NotEqual(t, s.alone(completions, body), a.text())
	assert.Equal(t, enginesim.KVForeignRead, firstFault(t, s.d))
}

func TestFewTokensOfATurnAreComputed(t *testing.T) {
	s := newScene(t, bothWays)
	back, next := s.firstTurn(completion("turn"))
	// P has all but the last block of it.
	body := with(completion("turn"), obj{"prompt": next})
	s.prefillWith(body, back)
	assert.Zero(t, s.p.Stats().ExternalKVTransfer)
	waitFor(t, "D lets go", func() bool { return s.d.Stats().PinnedBlocks == 0 })
}

func TestKVOfATurnIsKeptForATime(t *testing.T) {
	s := newScene(t, bothWays, func(_, d *enginesim.Config) {
		d.Extra = map[string]string{"bidirectional_kv_xfer": "true", "decoder_kv_blocks_ttl": "0.05"}
	})
	s.firstTurn(completion("turn"))
	waitFor(t, "D lets go", func() bool { return s.d.Stats().PinnedBlocks == 0 })
	assert.NoError(t, s.d.CheckKV())
	assert.Zero(t, s.d.Stats().Expired)
}

// P declines what D is about to let go of, with a 500.
func TestKVOfATurnThatIsAboutToExpireIsDeclined(t *testing.T) {
	s := newScene(t, bothWays, func(_, d *enginesim.Config) {
		d.Extra = map[string]string{"bidirectional_kv_xfer": "true", "decoder_kv_blocks_ttl": "4"}
	})
	back, next := s.firstTurn(completion("turn"))
	s.restartP()
	a := s.post(t.Context(), s.p, completions, with(completion("turn"), obj{"prompt": next, "max_tokens": 1, "kv_transfer_params": back}))
	assert.Equal(t, 500, a.status, a.body)
}

// Whoever uses a turn's handoff twice gets what lies there by then.
func TestKVOfATurnIsGivenOnce(t *testing.T) {
	s := newScene(t, bothWays)
	back, next := s.firstTurn(completion("turn"))
	for range 2 {
		s.restartP()
		s.prefillWith(with(completion("turn"), obj{"prompt": next}), back)
	}
	assert.Equal(t, enginesim.KVDoubleUse, firstFault(t, s.d))
}

func TestEnginesThatWereNotToldGiveNothingBack(t *testing.T) {
	s := newScene(t)
	body := completion("turn")
	a := s.decode(completions, body, s.prefill(completions, body))
	assert.Equal(t, "null", a.get("kv_transfer_params").Raw)
	_, err := enginesim.Start(enginesim.Config{Connector: "nixl-push", Extra: map[string]string{"bidirectional_kv_xfer": "true"}})
	assert.ErrorContains(t, err, "push")
}

func TestRenderSaysWhichTokensAPromptHas(t *testing.T) {
	s := newScene(t)
	a := s.post(t.Context(), s.p, completions+"/render", obj{"model": "tiny", "prompt": "abc"})
	assert.JSONEq(t, `[97,98,99]`, a.get("0.token_ids").Raw, a.body)
	asked := obj{"model": "tiny", "messages": []obj{{"role": "user", "content": "abc"}}, "max_tokens": 1, "return_token_ids": true}
	a = s.post(t.Context(), s.p, chat+"/render", asked)
	assert.JSONEq(t, s.post(t.Context(), s.p, chat, asked).get("prompt_token_ids").Raw, a.get("token_ids").Raw)
	assert.Equal(t, 404, s.post(t.Context(), s.p, completions+"/render", obj{"model": "other", "prompt": "a"}).status)
}
