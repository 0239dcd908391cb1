// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var relaying = simtest.Of("tpu")

// P names its KV by four keys. D reads the whole blocks and computes the rest.
func TestDReadsTheWholeBlocks(t *testing.T) {
	s := simtest.New(t, relaying)
	body := simtest.Completion("x")
	h := s.PrefillOnly(body).Params(t)
	assert.Len(t, h, 4)
	assert.IsType(t, "", h["remote_port"])
	s.Right(body, s.Decode(body, h))
	assert.EqualValues(t, 240/simtest.Block*simtest.Block, s.D.Stats().ExternalKVTransfer)
	s.Clean()
}

func TestAPromptWithoutAWholeBlock(t *testing.T) {
	s := simtest.New(t, relaying)
	body := simtest.Obj{"model": "tiny", "prompt": "abc", "max_tokens": 4, "temperature": 0}
	assert.Equal(t, "{}", s.PrefillOnly(body).Get("kv_transfer_params").Raw)
	assert.Zero(t, s.P.Stats().PinnedBlocks)
	assert.Equal(t, 200, s.Decode(body, simtest.Obj{}).Status)
}

func TestWhatHarmsD(t *testing.T) {
	x := simtest.Completion("x")
	for _, key := range []string{"uuid", "remote_block_ids", "remote_host", "remote_port"} {
		t.Run("without "+key+" it dies", func(t *testing.T) {
			s := simtest.New(t, relaying, simtest.OwnPorts(t))
			h := s.PrefillOnly(x).Params(t)
			delete(h, key)
			s.Kills(s.D, s.Decode(x, h))
		})
	}
	t.Run("another prompt's blocks", func(t *testing.T) {
		s := simtest.New(t, relaying)
		h := s.PrefillOnly(x).Params(t)
		h["remote_block_ids"] = []int{1}
		assert.Equal(t, 500, s.Decode(x, h).Status)
	})
	t.Run("the lease ends", func(t *testing.T) {
		s := simtest.New(t, relaying, func(p, _ *enginesim.Config) {
			p.Extra = map[string]string{"TPU_P2P_WAIT_PULL_TIMEOUT": "0.05"}
		})
		s.PrefillOnly(x)
		simtest.WaitFor(t, "the time is over", func() bool { return s.P.Stats().Expired == 1 })
	})
}
