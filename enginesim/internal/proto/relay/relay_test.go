// SPDX-License-Identifier: Apache-2.0

package relay_test

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

var relaying = simtest.Of("tpu")

// prefill runs P's leg, which carries no parameters.
func prefill(t *testing.T, s *simtest.Scene, body simtest.Obj) gjson.Result {
	t.Helper()
	a := s.Ask(s.P, simtest.With(body, simtest.Obj{"max_tokens": 1}))
	require.Equal(t, 200, a.Status, a.Body)
	return a.Get("kv_transfer_params")
}

func object(t *testing.T, v gjson.Result) simtest.Obj {
	t.Helper()
	h, ok := v.Value().(map[string]any)
	require.True(t, ok, v.Raw)
	return h
}

// P names its KV by four keys. D reads the whole blocks and computes the rest.
func TestDReadsTheWholeBlocks(t *testing.T) {
	s := simtest.New(t, relaying)
	body := simtest.Completion("x")
	h := object(t, prefill(t, s, body))
	assert.Len(t, h, 4)
	assert.IsType(t, "", h["remote_port"])
	a := s.Decode(body, h)
	s.Right(body, a)
	assert.EqualValues(t, 240/simtest.Block*simtest.Block, s.D.Stats().ExternalKVTransfer)
	s.Clean()
}

func TestAPromptWithoutAWholeBlock(t *testing.T) {
	s := simtest.New(t, relaying)
	body := simtest.Obj{"model": "tiny", "prompt": "abc", "max_tokens": 4, "temperature": 0}
	h := prefill(t, s, body)
	assert.Equal(t, "{}", h.Raw)
	assert.Zero(t, s.P.Stats().PinnedBlocks)
	assert.Equal(t, 200, s.Decode(body, simtest.Obj{}).Status)
}

func TestWhatHarmsD(t *testing.T) {
	for _, key := range []string{"uuid", "remote_block_ids", "remote_host", "remote_port"} {
		t.Run("without "+key+" it dies", func(t *testing.T) {
			s := simtest.New(t, relaying, simtest.OwnPorts(t))
			h := object(t, prefill(t, s, simtest.Completion("x")))
			delete(h, key)
			assert.Equal(t, 500, s.Decode(simtest.Completion("x"), h).Status)
			s.Dies(s.D)
		})
	}
	t.Run("another prompt's blocks", func(t *testing.T) {
		s := simtest.New(t, relaying)
		h := object(t, prefill(t, s, simtest.Completion("x")))
		h["remote_block_ids"] = []int{1}
		assert.Equal(t, 500, s.Decode(simtest.Completion("x"), h).Status)
	})
	t.Run("the lease ends", func(t *testing.T) {
		s := simtest.New(t, relaying, func(p, _ *enginesim.Config) {
			p.Extra = map[string]string{"TPU_P2P_WAIT_PULL_TIMEOUT": "0.05"}
		})
		prefill(t, s, simtest.Completion("x"))
		simtest.WaitFor(t, "the time is over", func() bool { return s.P.Stats().Expired == 1 })
	})
}
