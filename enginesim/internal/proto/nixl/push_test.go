// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"context"
	"encoding/json"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func pushing(p, d *enginesim.Config) {
	p.Connector, d.Connector, p.EngineID = "nixl-push", "nixl-push", "pdkit-prefill"
}

// pushParams are what a proxy tells D before P has answered (docs/protocols/nixl-push.md, recording 05).
func pushParams(s *enginesimtest.Scene, id string) enginesimtest.Obj {
	host, port, err := net.SplitHostPort(s.P.SideChannel())
	require.NoError(s.T, err)
	number, err := strconv.Atoi(port)
	require.NoError(s.T, err)
	return enginesimtest.Obj{"do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": "pdkit-prefill",
		"remote_host": host, "remote_port": number, "tp_size": 1, "pp_size": 1, "remote_request_id": id}
}

func pushPrefill(s *enginesimtest.Scene, body enginesimtest.Obj, id string) enginesimtest.Response {
	return s.Post(s.T.Context(), s.P, enginesimtest.Completions,
		enginesimtest.With(body, enginesimtest.Obj{"max_tokens": 1,
			"kv_transfer_params": enginesimtest.Obj{"do_remote_decode": true}}), "X-Request-Id", id)
}

// pushDecode sends a decode leg and gives its response when it comes.
func pushDecode(ctx context.Context, s *enginesimtest.Scene, body, params enginesimtest.Obj,
	id string) <-chan enginesimtest.Response {
	ch := make(chan enginesimtest.Response, 1)
	go func() {
		ch <- s.Post(ctx, s.D, enginesimtest.Completions, enginesimtest.With(body, enginesimtest.Obj{"kv_transfer_params": params}),
			"X-Request-Id", id)
	}()
	return ch
}

func pushedRight(s *enginesimtest.Scene, body enginesimtest.Obj, a enginesimtest.Response) {
	s.T.Helper()
	require.NoError(s.T, a.Err)
	require.Equal(s.T, 200, a.Status, a.Body)
	assert.Equal(s.T, s.Alone(enginesimtest.Completions, body), a.Text())
	p, d := s.P.Stats(), s.D.Stats()
	assert.EqualValues(s.T, 240, d.ExternalKVTransfer)
	assert.Zero(s.T, d.LocalCompute)
	assert.EqualValues(s.T, (240+enginesimtest.Block-1)/enginesimtest.Block*enginesimtest.Block*16, p.BytesTransferred,
		"P is the writer, and counts")
	assert.Zero(s.T, d.BytesTransferred)
	assert.Zero(s.T, p.PinnedBlocks)
	assert.NoError(s.T, s.P.CheckKV())
	assert.NoError(s.T, s.D.CheckKV())
}

// TestPushSerial is docs/protocols/nixl-push.md, recording 01: P's handoff of 13 keys, relayed as it is.
func TestPushSerial(t *testing.T) {
	s := enginesimtest.New(t, pushing)
	body := enginesimtest.Completion("serial")
	p := pushPrefill(s, body, "a")
	var h enginesimtest.Obj
	require.NoError(t, json.Unmarshal([]byte(p.Get("kv_transfer_params").Raw), &h), p.Body)
	assert.Len(t, h, 12+1)
	assert.Equal(t, "push", h["transfer_mode"])
	assert.Regexp(t, `^cmpl-a-0-[0-9a-f]{8}$`, h["remote_request_id"])
	a := <-pushDecode(t.Context(), s, body, h, "a")
	pushedRight(s, body, a)
	assert.Zero(t, a.Get("usage.prompt_tokens_details.cached_tokens").Int(), "P's own count")
}

// TestPushTogether are docs/protocols/nixl-push.md, recording 05: either leg may come first.
func TestPushTogether(t *testing.T) {
	for _, first := range []string{"D", "P"} {
		t.Run(first+" first", func(t *testing.T) {
			s := enginesimtest.New(t, pushing)
			body := enginesimtest.Completion("together")
			var got <-chan enginesimtest.Response
			if first == "D" {
				got = pushDecode(t.Context(), s, body, pushParams(s, "a"), "a")
				enginesimtest.WaitFor(t, "D waits", func() bool { return s.D.Stats().Waiting == 1 })
			}
			require.Equal(t, 200, pushPrefill(s, body, "a").Status)
			if first == "P" {
				got = pushDecode(t.Context(), s, body, pushParams(s, "a"), "a")
			}
			a := <-got
			pushedRight(s, body, a)
			assert.EqualValues(t, 240, a.Get("usage.prompt_tokens_details.cached_tokens").Int(),
				"nobody told P's count")
		})
	}
}

// TestPushThatNobodyWrites are docs/protocols/nixl-push.md, recordings 04, 06 and 09: D waits until its client leaves,
// and never gets its blocks back.
func TestPushThatNobodyWrites(t *testing.T) {
	for name, act := range map[string]func(s *enginesimtest.Scene, body enginesimtest.Obj) enginesimtest.Obj{
		"other X-Request-Id on P": func(s *enginesimtest.Scene, body enginesimtest.Obj) enginesimtest.Obj {
			require.Equal(s.T, 200, pushPrefill(s, body, "b").Status)
			return pushParams(s, "a")
		},
		"P refused its leg": func(s *enginesimtest.Scene, body enginesimtest.Obj) enginesimtest.Obj {
			require.Equal(s.T, 400, pushPrefill(s, enginesimtest.With(body, enginesimtest.Obj{"min_tokens": 5}), "a").Status)
			return pushParams(s, "a")
		},
		"P did not know what its leg is for": func(s *enginesimtest.Scene, body enginesimtest.Obj) enginesimtest.Obj {
			require.Equal(s.T, 200, s.Post(s.T.Context(), s.P, enginesimtest.Completions,
				enginesimtest.With(body, enginesimtest.Obj{"max_tokens": 1}), "X-Request-Id", "a").Status)
			return pushParams(s, "a")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := enginesimtest.New(t, pushing)
			body := enginesimtest.Completion("orphan")
			params := act(s, body)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			got := pushDecode(ctx, s, body, params, "a")
			enginesimtest.WaitFor(t, "D waits", func() bool { return s.D.Stats().Waiting == 1 })
			time.Sleep(time.Second) // D has registered, which P does not show
			assert.Empty(t, got, "it was answered")
			leave()
			require.ErrorIs(t, (<-got).Err, context.Canceled)
			enginesimtest.WaitFor(t, "D has given up", func() bool {
				return s.D.Stats().Running == 0 &&
					s.D.Stats().Waiting == 0
			})
			assert.Equal(t, 240/enginesimtest.Block+1, s.D.Stats().UsedBlocks, "its blocks are lost")
			enginesimtest.WaitFor(t, "they belong to nobody", func() bool { return s.D.CheckKV() != nil })
			s.Alive(s.D)
		})
	}
}

func TestPushWithFieldsThatDoNotFit(t *testing.T) {
	t.Run("an engine id that does not answer there: 500", func(t *testing.T) {
		s := enginesimtest.New(t, pushing)
		body := enginesimtest.Completion("x")
		a := <-pushDecode(t.Context(), s, body, enginesimtest.With(pushParams(s, "a"),
			enginesimtest.Obj{"remote_engine_id": "other"}), "a")
		assert.Equal(t, 500, a.Status)
		s.Alive(s.D)
	})
	for _, key := range []string{"remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id"} {
		t.Run("without "+key+" the engine dies", func(t *testing.T) {
			s := enginesimtest.New(t, pushing, enginesimtest.OwnPorts(t))
			params := pushParams(s, "a")
			delete(params, key)
			a := <-pushDecode(t.Context(), s, enginesimtest.Completion("x"), params, "a")
			assert.Equal(t, 500, a.Status)
			s.Dies(s.D)
		})
	}
	t.Run("a leg that stays away: P's blocks wait for the lease", func(t *testing.T) {
		s := enginesimtest.New(t, pushing, func(p, _ *enginesim.Config) { p.Lease = 50 * time.Millisecond })
		require.Equal(t, 200, pushPrefill(s, enginesimtest.Completion("x"), "a").Status)
		enginesimtest.WaitFor(t, "the lease ends", func() bool { return s.P.Stats().Expired == 1 })
		assert.Equal(t, enginesim.KVLeak, enginesimtest.FirstFault(t, s.P))
	})
}
