// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

const hex32 = "93923d63113b4b338973f24d19d4bf11"

func p2p(t *testing.T, extra map[string]string) *scene {
	t.Helper()
	return newScene(t, func(p, d *enginesim.Config) {
		p.Connector, d.Connector, p.Extra, d.Extra = "p2pnccl", "p2pnccl", extra, extra
	})
}

var plainIDs = map[string]string{"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}

func (s *scene) pairID() string {
	return "___prefill_addr_" + s.p.SideChannel() + "___decode_addr_" + s.d.SideChannel() + "_" + hex32
}

// waitsFor sends a request to D that nobody answers.
func (s *scene) waitsFor(body obj, headers ...string) {
	s.t.Helper()
	ctx, leave := context.WithCancel(s.t.Context())
	defer leave()
	got := make(chan answer, 1)
	go func() { got <- s.post(ctx, s.d, completions, body, headers...) }()
	waitFor(s.t, "D waits", func() bool { return s.d.Stats().Waiting == 1 })
	time.Sleep(50 * time.Millisecond)
	assert.Empty(s.t, got, "it was answered")
	leave()
	require.ErrorIs(s.t, (<-got).err, context.Canceled)
	waitFor(s.t, "D is idle", func() bool { return s.d.Stats().Waiting == 0 })
}

func TestKVFollowsTheAddressesInTheID(t *testing.T) {
	s := p2p(t, plainIDs)
	body, id := completion("a"), s.pairID()
	a := s.post(t.Context(), s.p, completions, with(body, obj{"max_tokens": 1}), "X-Request-Id", id)
	require.Equal(t, 200, a.status, a.body)
	a = s.post(t.Context(), s.d, completions, body, "X-Request-Id", id)
	assert.Equal(t, s.alone(completions, body), a.text())
	assert.EqualValues(t, 240, s.d.Stats().ExternalKVTransfer)
	assert.EqualValues(t, 1, s.p.Stats().Transfers, "P writes")
	assert.NoError(t, s.p.CheckKV())
	assert.NoError(t, s.d.CheckKV())
}

func TestADecodeWithoutItsTensorsWaits(t *testing.T) {
	s := p2p(t, plainIDs)
	s.waitsFor(completion("never prefilled"), "X-Request-Id", s.pairID())
	elsewhere := strings.Replace(s.pairID(), "___decode_addr_127.0.0.1", "___decode_addr_127.0.0.2", 1)
	s.post(t.Context(), s.p, completions, with(completion("b"), obj{"max_tokens": 1}), "X-Request-Id", elsewhere)
	s.waitsFor(completion("b"), "X-Request-Id", elsewhere)

	s = p2p(t, nil)
	id := s.pairID()
	s.post(t.Context(), s.p, completions, with(completion("c"), obj{"max_tokens": 1}), "X-Request-Id", id)
	s.waitsFor(completion("c"), "X-Request-Id", id) // the random suffix of vLLM 0.14 makes two ids of one
}

func TestAnIDWithoutAddressesKillsTheEngine(t *testing.T) {
	s := p2p(t, plainIDs)
	for _, e := range []*enginesim.Engine{s.p, s.d} {
		assert.Equal(t, 500, s.post(t.Context(), e, completions, completion("a"), "X-Request-Id", "plain").status)
		s.dies(e)
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	return port
}

func TestALookupBufferGivesAPromptOnce(t *testing.T) {
	port := freePort(t)
	s := newScene(t, func(p, d *enginesim.Config) {
		p.Connector, d.Connector = "pynccl", "pynccl"
		p.SideChannel, d.Extra = "127.0.0.1:"+port, map[string]string{"kv_ip": "127.0.0.1", "kv_port": port}
	})
	for range 2 { // the same prompt twice
		s.prefillOnly(completions, completion("a"))
	}
	for range 2 {
		assert.Equal(t, s.alone(completions, completion("a")), s.post(t.Context(), s.d, completions, completion("a")).text())
	}
	assert.NoError(t, s.p.CheckKV())
	assert.NoError(t, s.d.CheckKV())
	assert.Positive(t, s.d.Stats().ExternalKVTransfer)
	s.waitsFor(completion("a"))
}
