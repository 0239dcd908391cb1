// SPDX-License-Identifier: Apache-2.0

package mooncakeascend_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var ascending = simtest.Of("mooncake-ascend")

// TestAscendPull is the way of vllm-ascend's MooncakeConnectorV1: P's handoff of 14 keys, relayed as it is.
func TestAscendPull(t *testing.T) {
	s := simtest.New(t, ascending)
	body := simtest.Completion("x")
	h := s.Prefill(body)
	assert.Len(t, h, 14)
	assert.EqualValues(t, (240+simtest.Block-1)/simtest.Block, h["num_prompt_blocks"])
	a := s.Decode(body, h)
	s.Right(body, a)
	assert.EqualValues(t, 240, s.D.Stats().ExternalKVTransfer)
	s.Clean()
}

// TestAscendPrefillThatEndsByStopGivesNothing: request_finished wants length.
func TestAscendPrefillThatEndsByStopGivesNothing(t *testing.T) {
	s := simtest.New(t, ascending)
	body := simtest.Completion("x")
	first := s.Ask(s.O, simtest.With(body, simtest.Obj{"max_tokens": 1})).Text()
	a := s.Ask(s.P, simtest.With(body,
		simtest.Obj{"max_tokens": 1, "stop": first, "kv_transfer_params": simtest.Obj{"do_remote_decode": true}}))
	require.Equal(t, 200, a.Status)
	assert.Equal(t, "stop", a.Get("choices.0.finish_reason").String())
	assert.Equal(t, gjson.Null, a.Get("kv_transfer_params").Type)
	assert.Zero(t, s.P.Stats().PinnedBlocks)
}

func TestAscendHandoffsThatHarm(t *testing.T) {
	for name, change := range map[string]func(simtest.Obj){
		"no block ids":              simtest.Without("remote_block_ids"),
		"an empty list":             simtest.Set("remote_block_ids", []any{}),
		"a flat list":               simtest.Set("remote_block_ids", []int{1, 2}),
		"no num_prompt_blocks":      simtest.Without("num_prompt_blocks"),
		"too few num_prompt_blocks": simtest.Set("num_prompt_blocks", 1),
	} {
		t.Run(name+" kills", func(t *testing.T) {
			s := simtest.New(t, ascending, simtest.OwnPorts(t))
			h := s.Prefill(simtest.Completion("x"))
			change(h)
			assert.Equal(t, 500, s.Decode(simtest.Completion("x"), h).Status)
			s.Dies(s.D)
		})
	}
	for _, key := range []string{"remote_engine_id", "remote_host", "remote_port", "remote_request_id"} {
		t.Run("without "+key+" it hangs", func(t *testing.T) {
			s := simtest.New(t, ascending)
			h := s.Prefill(simtest.Completion("x"))
			delete(h, key)
			s.Hangs(simtest.Completion("x"), h)
		})
	}
	t.Run("without do_remote_prefill D computes itself", func(t *testing.T) {
		s := simtest.New(t, ascending)
		h := s.Prefill(simtest.Completion("x"))
		delete(h, "do_remote_prefill")
		a := s.Decode(simtest.Completion("x"), h)
		s.Right(simtest.Completion("x"), a)
		assert.Equal(t, enginesim.KVNoTransfer, simtest.FirstFault(t, s.D))
		assert.Positive(t, s.P.Stats().PinnedBlocks)
	})
	t.Run("another engine answers there: 500", func(t *testing.T) {
		s := simtest.New(t, ascending)
		h := s.Prefill(simtest.Completion("x"))
		h["remote_engine_id"] = "other"
		assert.Equal(t, 500, s.Decode(simtest.Completion("x"), h).Status)
	})
	t.Run("a decode that the API refuses lets P go", func(t *testing.T) {
		s := simtest.New(t, ascending)
		h := s.Prefill(simtest.Completion("x"))
		assert.Equal(t, 400, s.Decode(simtest.With(simtest.Completion("x"), simtest.Obj{"max_tokens": 100000}), h).Status)
		simtest.WaitFor(t, "P is free", func() bool { return s.P.Stats().PinnedBlocks == 0 })
	})
	t.Run("blocks wait for the time that the environment gives", func(t *testing.T) {
		s := simtest.New(t, ascending, func(p, _ *enginesim.Config) {
			p.Extra = map[string]string{"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "0.05"}
		})
		s.Prefill(simtest.Completion("x"))
		simtest.WaitFor(t, "the time is over", func() bool { return s.P.Stats().Expired == 1 })
	})
}
