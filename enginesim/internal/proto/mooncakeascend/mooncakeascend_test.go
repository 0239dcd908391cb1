// SPDX-License-Identifier: Apache-2.0

package mooncakeascend_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
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
	s.Right(body, s.Decode(body, h))
	assert.EqualValues(t, 240, s.D.Stats().ExternalKVTransfer)
	s.Clean()
}

// TestAscendPrefillThatEndsByStopGivesNothing: request_finished wants length.
func TestAscendPrefillThatEndsByStopGivesNothing(t *testing.T) {
	s := simtest.New(t, ascending)
	body := simtest.Completion("x")
	a := s.PrefillOnly(simtest.With(body, simtest.Obj{"stop": s.First(body),
		"kv_transfer_params": simtest.Obj{"do_remote_decode": true}}))
	assert.Equal(t, "stop", a.Get("choices.0.finish_reason").String())
	assert.Equal(t, gjson.Null, a.Get("kv_transfer_params").Type)
	assert.Zero(t, s.P.Stats().PinnedBlocks)
}

func TestAscendHandoffsThatHarm(t *testing.T) {
	x := simtest.Completion("x")
	for name, change := range map[string]func(simtest.Obj){
		"no block ids":              simtest.Without("remote_block_ids"),
		"an empty list":             simtest.Set("remote_block_ids", []any{}),
		"a flat list":               simtest.Set("remote_block_ids", []int{1, 2}),
		"no num_prompt_blocks":      simtest.Without("num_prompt_blocks"),
		"too few num_prompt_blocks": simtest.Set("num_prompt_blocks", 1),
	} {
		t.Run(name+" kills", func(t *testing.T) {
			s := simtest.New(t, ascending, simtest.OwnPorts(t))
			h := s.Prefill(x)
			change(h)
			s.Kills(s.D, s.Decode(x, h))
		})
	}
	for _, key := range []string{"remote_engine_id", "remote_host", "remote_port", "remote_request_id"} {
		t.Run("without "+key+" it hangs", func(t *testing.T) {
			s := simtest.New(t, ascending)
			h := s.Prefill(x)
			delete(h, key)
			s.Hangs(x, h)
		})
	}
	t.Run("without do_remote_prefill D computes itself", func(t *testing.T) {
		s := simtest.New(t, ascending)
		h := s.Prefill(x)
		delete(h, "do_remote_prefill")
		s.Right(x, s.Decode(x, h))
		assert.Equal(t, enginesim.KVNoTransfer, simtest.FirstFault(t, s.D))
		assert.Positive(t, s.P.Stats().PinnedBlocks)
	})
	t.Run("another engine answers there: 500", func(t *testing.T) {
		s := simtest.New(t, ascending)
		h := s.Prefill(x)
		h["remote_engine_id"] = "other"
		assert.Equal(t, 500, s.Decode(x, h).Status)
	})
	t.Run("a decode that the API refuses lets P go", func(t *testing.T) {
		s := simtest.New(t, ascending)
		long := simtest.With(x, simtest.Obj{"max_tokens": 100000})
		assert.Equal(t, 400, s.Decode(long, s.Prefill(x)).Status)
		simtest.WaitFor(t, "P is free", func() bool { return s.P.Stats().PinnedBlocks == 0 })
	})
	t.Run("blocks wait for the time that the environment gives", func(t *testing.T) {
		s := simtest.New(t, ascending, func(p, _ *enginesim.Config) {
			p.Extra = map[string]string{"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "0.05"}
		})
		s.Prefill(x)
		simtest.WaitFor(t, "the time is over", func() bool { return s.P.Stats().Expired == 1 })
	})
}
