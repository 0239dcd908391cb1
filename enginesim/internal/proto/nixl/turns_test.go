// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

var bothWays = simtest.Of("nixl", "bidirectional_kv_xfer", "true")

// firstTurn runs a turn over both engines, and gives D's handoff and the prompt of the next turn.
func firstTurn(s *simtest.Scene, body simtest.Obj) (back simtest.Obj, next string) {
	s.T.Helper()
	a := s.Pair(body)
	return a.Params(s.T), body["prompt"].(string) + a.Text() + " and what follows from that?"
}

func prefillWith(s *simtest.Scene, body, params simtest.Obj) simtest.Obj {
	s.T.Helper()
	return s.PrefillOnly(simtest.Leg(body, params)).Params(s.T)
}

// restartP empties P's prefix cache, in which it would find the first prompt.
func restartP(s *simtest.Scene) {
	s.T.Helper()
	require.NoError(s.T, s.P.Restart())
	s.HTTP.CloseIdleConnections()
}

func TestKVOfATurnGoesBackToPrefill(t *testing.T) {
	s := simtest.New(t, bothWays, simtest.OwnPorts(t))
	back, next := firstTurn(s, simtest.Completion("turn"))
	assert.Equal(t, true, back["do_remote_decode"])
	assert.Equal(t, false, back["do_remote_prefill"])
	assert.EqualValues(t, 240+24-1, back["remote_num_tokens"], "the last token's KV was not computed")
	assert.NotNil(t, back["remote_blocks_expiry_time"])
	assert.NoError(t, s.D.CheckKV(), "what is kept for a next turn is no leak")
	assert.Positive(t, s.D.Stats().PinnedBlocks)

	restartP(s)
	body := simtest.With(simtest.Completion("turn"), simtest.Obj{"prompt": next})
	h := prefillWith(s, body, back)
	assert.EqualValues(t, 263, s.P.Stats().ExternalKVTransfer)
	assert.Zero(t, s.D.Stats().PinnedBlocks, "D lets go once it was read")
	s.Right(body, s.Decode(body, h))
	s.Clean()
}

// P compares no tokens: a prompt that is not the last turn's continuation is answered wrongly, with 200.
func TestKVOfATurnIsTakenByPosition(t *testing.T) {
	s := simtest.New(t, bothWays, simtest.OwnPorts(t))
	back, next := firstTurn(s, simtest.Completion("turn"))
	restartP(s)
	body := simtest.With(simtest.Completion("turn"), simtest.Obj{"prompt": "X" + next[1:]})
	a := s.Decode(body, prefillWith(s, body, back))
	assert.Equal(t, 200, a.Status)
	assert.NotEqual(t, s.Alone(body), a.Text())
	assert.Equal(t, enginesim.KVForeignRead, simtest.FirstFault(t, s.D))
}

func TestFewTokensOfATurnAreComputed(t *testing.T) {
	s := simtest.New(t, bothWays)
	back, next := firstTurn(s, simtest.Completion("turn"))
	// P has all but the last block of it.
	body := simtest.With(simtest.Completion("turn"), simtest.Obj{"prompt": next})
	prefillWith(s, body, back)
	assert.Zero(t, s.P.Stats().ExternalKVTransfer)
	simtest.WaitFor(t, "D lets go", func() bool { return s.D.Stats().PinnedBlocks == 0 })
}

func TestKVOfATurnIsKeptForATime(t *testing.T) {
	s := simtest.New(t, bothWays, func(_, d *enginesim.Config) {
		d.Extra = map[string]string{"bidirectional_kv_xfer": "true", "decoder_kv_blocks_ttl": "0.05"}
	})
	firstTurn(s, simtest.Completion("turn"))
	simtest.WaitFor(t, "D lets go", func() bool { return s.D.Stats().PinnedBlocks == 0 })
	assert.NoError(t, s.D.CheckKV())
	assert.Zero(t, s.D.Stats().Expired)
}

// P declines what D is about to let go of, with a 500.
func TestKVOfATurnThatIsAboutToExpireIsDeclined(t *testing.T) {
	s := simtest.New(t, bothWays, simtest.OwnPorts(t), func(_, d *enginesim.Config) {
		d.Extra = map[string]string{"bidirectional_kv_xfer": "true", "decoder_kv_blocks_ttl": "4"}
	})
	back, next := firstTurn(s, simtest.Completion("turn"))
	restartP(s)
	a := s.Ask(s.P, simtest.With(simtest.Completion("turn"),
		simtest.Obj{"prompt": next, "max_tokens": 1, "kv_transfer_params": back}))
	assert.Equal(t, 500, a.Status, a.Body)
}

// Whoever uses a turn's handoff twice gets what lies there by then.
func TestKVOfATurnIsGivenOnce(t *testing.T) {
	s := simtest.New(t, bothWays, simtest.OwnPorts(t))
	back, next := firstTurn(s, simtest.Completion("turn"))
	for range 2 {
		restartP(s)
		prefillWith(s, simtest.With(simtest.Completion("turn"), simtest.Obj{"prompt": next}), back)
	}
	assert.Equal(t, enginesim.KVDoubleUse, simtest.FirstFault(t, s.D))
}

func TestEnginesThatWereNotToldGiveNothingBack(t *testing.T) {
	s := simtest.New(t)
	body := simtest.Completion("turn")
	a := s.Decode(body, s.Prefill(body))
	assert.Equal(t, "null", a.Get("kv_transfer_params").Raw)
	_, err := enginesim.Start(enginesim.Config{Connector: "nixl-push",
		Extra: map[string]string{"bidirectional_kv_xfer": "true"}})
	assert.ErrorContains(t, err, "push")
}
