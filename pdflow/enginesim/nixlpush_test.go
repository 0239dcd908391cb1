// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"context"
	"encoding/json"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func pushing(p, d *enginesim.Config) {
	p.Connector, d.Connector, p.EngineID = "nixl-push", "nixl-push", "pdkit-prefill"
}

// pushParams are what a proxy tells D before P has answered (capture nixl-push/05).
func (s *scene) pushParams(id string) obj {
	host, port, err := net.SplitHostPort(s.p.SideChannel())
	require.NoError(s.t, err)
	number, err := strconv.Atoi(port)
	require.NoError(s.t, err)
	return obj{"do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": "pdkit-prefill", "remote_host": host, "remote_port": number, "tp_size": 1, "pp_size": 1, "remote_request_id": id}
}

func (s *scene) pushPrefill(body obj, id string) answer {
	return s.post(s.t.Context(), s.p, completions, with(body, obj{"max_tokens": 1, "kv_transfer_params": obj{"do_remote_decode": true}}), "X-Request-Id", id)
}

// pushDecode sends a decode leg and gives its answer when it comes.
func (s *scene) pushDecode(ctx context.Context, body, params obj, id string) <-chan answer {
	ch := make(chan answer, 1)
	go func() {
		ch <- s.post(ctx, s.d, completions, with(body, obj{"kv_transfer_params": params}), "X-Request-Id", id)
	}()
	return ch
}

func (s *scene) pushedRight(body obj, a answer) {
	s.t.Helper()
	require.NoError(s.t, a.err)
	require.Equal(s.t, 200, a.status, a.body)
	assert.Equal(s.t, s.alone(completions, body), a.text())
	p, d := s.p.Stats(), s.d.Stats()
	assert.EqualValues(s.t, 240, d.ExternalKVTransfer)
	assert.Zero(s.t, d.LocalCompute)
	assert.EqualValues(s.t, (240+block-1)/block*block*16, p.BytesTransferred, "P is the writer, and counts")
	assert.Zero(s.t, d.BytesTransferred)
	assert.Zero(s.t, p.PinnedBlocks)
	assert.NoError(s.t, s.p.CheckKV())
	assert.NoError(s.t, s.d.CheckKV())
}

// TestPushSerial is capture nixl-push/01: P's handoff of 13 keys, relayed as it is.
func TestPushSerial(t *testing.T) {
	s := newScene(t, pushing)
	body := completion("serial")
	p := s.pushPrefill(body, "a")
	var h obj
	require.NoError(t, json.Unmarshal([]byte(p.get("kv_transfer_params").Raw), &h), p.body)
	assert.Len(t, h, 12+1)
	assert.Equal(t, "push", h["transfer_mode"])
	assert.Regexp(t, `^cmpl-a-0-[0-9a-f]{8}$`, h["remote_request_id"])
	a := <-s.pushDecode(t.Context(), body, h, "a")
	s.pushedRight(body, a)
	assert.Zero(t, a.get("usage.prompt_tokens_details.cached_tokens").Int(), "P's own count")
}

// TestPushTogether are captures nixl-push/05: either leg may come first.
func TestPushTogether(t *testing.T) {
	for _, first := range []string{"D", "P"} {
		t.Run(first+" first", func(t *testing.T) {
			s := newScene(t, pushing)
			body := completion("together")
			var got <-chan answer
			if first == "D" {
				got = s.pushDecode(t.Context(), body, s.pushParams("a"), "a")
				waitFor(t, "D waits", func() bool { return s.d.Stats().Waiting == 1 })
			}
			require.Equal(t, 200, s.pushPrefill(body, "a").status)
			if first == "P" {
				got = s.pushDecode(t.Context(), body, s.pushParams("a"), "a")
			}
			a := <-got
			s.pushedRight(body, a)
			assert.EqualValues(t, 240, a.get("usage.prompt_tokens_details.cached_tokens").Int(), "nobody told P's count")
		})
	}
}

// TestPushThatNobodyWrites are captures nixl-push/04, 06 and 09: D waits until its
// client leaves, and never gets its blocks back.
func TestPushThatNobodyWrites(t *testing.T) {
	for name, act := range map[string]func(s *scene, body obj) obj{
		"other X-Request-Id on P": func(s *scene, body obj) obj {
			require.Equal(s.t, 200, s.pushPrefill(body, "b").status)
			return s.pushParams("a")
		},
		"P refused its leg": func(s *scene, body obj) obj {
			require.Equal(s.t, 400, s.pushPrefill(with(body, obj{"min_tokens": 5}), "a").status)
			return s.pushParams("a")
		},
		"P did not know what its leg is for": func(s *scene, body obj) obj {
			require.Equal(s.t, 200, s.post(s.t.Context(), s.p, completions, with(body, obj{"max_tokens": 1}), "X-Request-Id", "a").status)
			return s.pushParams("a")
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, pushing)
			body := completion("orphan")
			params := act(s, body)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			got := s.pushDecode(ctx, body, params, "a")
			waitFor(t, "D waits", func() bool { return s.d.Stats().Waiting == 1 })
			time.Sleep(50 * time.Millisecond)
			assert.Empty(t, got, "it was answered")
			leave()
			require.ErrorIs(t, (<-got).err, context.Canceled)
			waitFor(t, "D has given up", func() bool { return s.d.Stats().Running == 0 && s.d.Stats().Waiting == 0 })
			assert.Equal(t, 240/block+1, s.d.Stats().UsedBlocks, "its blocks are lost")
			assert.Error(t, s.d.CheckKV())
			s.alive(s.d)
		})
	}
}

func TestPushWithFieldsThatDoNotFit(t *testing.T) {
	t.Run("an engine id that does not answer there: 500", func(t *testing.T) {
		s := newScene(t, pushing)
		body := completion("x")
		a := <-s.pushDecode(t.Context(), body, with(s.pushParams("a"), obj{"remote_engine_id": "other"}), "a")
		assert.Equal(t, 500, a.status)
		s.alive(s.d)
	})
	for _, key := range []string{"remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id"} {
		t.Run("without "+key+" the engine dies", func(t *testing.T) {
			s := newScene(t, pushing)
			params := s.pushParams("a")
			delete(params, key)
			a := <-s.pushDecode(t.Context(), completion("x"), params, "a")
			assert.Equal(t, 500, a.status)
			s.dies(s.d)
		})
	}
	t.Run("a leg that stays away: P's blocks wait for the lease", func(t *testing.T) {
		s := newScene(t, pushing, func(p, _ *enginesim.Config) { p.Lease = 50 * time.Millisecond })
		require.Equal(t, 200, s.pushPrefill(completion("x"), "a").status)
		waitFor(t, "the lease ends", func() bool { return s.p.Stats().Expired == 1 })
		assert.Equal(t, enginesim.KVLeak, firstFault(t, s.p))
	})
}
