// SPDX-License-Identifier: Apache-2.0

package nccl_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const hex32 = "93923d63113b4b338973f24d19d4bf11"

func p2p(t *testing.T, extra map[string]string) *simtest.Scene {
	t.Helper()
	return simtest.New(t, func(p, d *enginesim.Config) {
		p.Connector, d.Connector, p.Extra, d.Extra = "p2pnccl", "p2pnccl", extra, extra
	}, simtest.OwnPorts(t))
}

var plainIDs = map[string]string{"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}

func pairID(s *simtest.Scene) string {
	return "___prefill_addr_" + s.P.SideChannel() + "___decode_addr_" + s.D.SideChannel() + "_" + hex32
}

func TestKVFollowsTheAddressesInTheID(t *testing.T) {
	s := p2p(t, plainIDs)
	body, id := simtest.Completion("a"), pairID(s)
	s.PrefillOnly(body, "X-Request-Id", id)
	s.Right(body, s.Ask(s.D, body, "X-Request-Id", id))
	assert.EqualValues(t, 240, s.D.Stats().ExternalKVTransfer)
	assert.EqualValues(t, 1, s.P.Stats().Transfers, "P writes")
	s.Clean()
}

func TestADecodeWithoutItsTensorsWaits(t *testing.T) {
	s := p2p(t, plainIDs)
	s.Unanswered(simtest.Completion("never prefilled"), "X-Request-Id", pairID(s))
	elsewhere := strings.Replace(pairID(s), "___decode_addr_127.0.0.1", "___decode_addr_127.0.0.2", 1)
	s.PrefillOnly(simtest.Completion("b"), "X-Request-Id", elsewhere)
	s.Unanswered(simtest.Completion("b"), "X-Request-Id", elsewhere)

	s = p2p(t, nil)
	id := pairID(s)
	s.PrefillOnly(simtest.Completion("c"), "X-Request-Id", id)
	s.Unanswered(simtest.Completion("c"), "X-Request-Id", id) // the random suffix of vLLM 0.14 makes two ids of one
}

func TestAnIDWithoutAddressesKillsTheEngine(t *testing.T) {
	s := p2p(t, plainIDs)
	for _, e := range []*enginesim.Engine{s.P, s.D} {
		s.Kills(e, s.Ask(e, simtest.Completion("a"), "X-Request-Id", "plain"))
	}
}

func TestALookupBufferGivesAPromptOnce(t *testing.T) {
	port, err := freeport.One()
	require.NoError(t, err)
	s := simtest.New(t, func(p, d *enginesim.Config) {
		p.Connector, d.Connector = "pynccl", "pynccl"
		p.SideChannel, d.Extra = "127.0.0.1:"+port, map[string]string{"kv_ip": "127.0.0.1", "kv_port": port}
	})
	for range 2 { // the same prompt twice
		s.PrefillOnly(simtest.Completion("a"))
	}
	for range 2 {
		assert.Equal(t, s.Alone(simtest.Completion("a")), s.Ask(s.D, simtest.Completion("a")).Text())
	}
	s.Clean()
	assert.Positive(t, s.D.Stats().ExternalKVTransfer)
	s.Unanswered(simtest.Completion("a"))
}
