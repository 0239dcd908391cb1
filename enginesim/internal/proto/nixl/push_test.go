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
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func pushing(p, d *enginesim.Config) {
	p.Connector, d.Connector, p.EngineID = "nixl-push", "nixl-push", "pdkit-prefill"
}

// pushParams are what a proxy tells D before P has answered (docs/protocols/nixl-push.md, recording 05).
func pushParams(s *simtest.Scene, id string) simtest.Obj {
	host, port, err := net.SplitHostPort(s.P.SideChannel())
	require.NoError(s.T, err)
	number, err := strconv.Atoi(port)
	require.NoError(s.T, err)
	return simtest.Obj{"do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": "pdkit-prefill",
		"remote_host": host, "remote_port": number, "tp_size": 1, "pp_size": 1, "remote_request_id": id}
}

func pushPrefill(s *simtest.Scene, body simtest.Obj, id string) simtest.Response {
	return s.Ask(s.P, simtest.With(body, simtest.Obj{"max_tokens": 1,
		"kv_transfer_params": simtest.Obj{"do_remote_decode": true}}), "X-Request-Id", id)
}

// pushDecode sends a decode leg and gives its response when it comes.
func pushDecode(ctx context.Context, s *simtest.Scene, body, params simtest.Obj,
	id string) <-chan simtest.Response {
	ch := make(chan simtest.Response, 1)
	go func() {
		ch <- s.Post(ctx, s.D, simtest.Completions, simtest.With(body, simtest.Obj{"kv_transfer_params": params}),
			"X-Request-Id", id)
	}()
	return ch
}

func pushedRight(s *simtest.Scene, body simtest.Obj, a simtest.Response) {
	s.T.Helper()
	s.Right(body, a)
	p, d := s.P.Stats(), s.D.Stats()
	assert.EqualValues(s.T, 240, d.ExternalKVTransfer)
	assert.Zero(s.T, d.LocalCompute)
	assert.EqualValues(s.T, (240+simtest.Block-1)/simtest.Block*simtest.Block*16, p.BytesTransferred,
		"P is the writer, and counts")
	assert.Zero(s.T, d.BytesTransferred)
	assert.Zero(s.T, p.PinnedBlocks)
	s.Clean()
}

// TestPushSerial is docs/protocols/nixl-push.md, recording 01: P's handoff of 13 keys, relayed as it is.
func TestPushSerial(t *testing.T) {
	s := simtest.New(t, pushing)
	body := simtest.Completion("serial")
	p := pushPrefill(s, body, "a")
	var h simtest.Obj
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
			s := simtest.New(t, pushing)
			body := simtest.Completion("together")
			var got <-chan simtest.Response
			if first == "D" {
				got = pushDecode(t.Context(), s, body, pushParams(s, "a"), "a")
				simtest.WaitFor(t, "D waits", func() bool { return s.D.Stats().Waiting == 1 })
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
	for name, act := range map[string]func(s *simtest.Scene, body simtest.Obj) simtest.Obj{
		"other X-Request-Id on P": func(s *simtest.Scene, body simtest.Obj) simtest.Obj {
			require.Equal(s.T, 200, pushPrefill(s, body, "b").Status)
			return pushParams(s, "a")
		},
		"P refused its leg": func(s *simtest.Scene, body simtest.Obj) simtest.Obj {
			require.Equal(s.T, 400, pushPrefill(s, simtest.With(body, simtest.Obj{"min_tokens": 5}), "a").Status)
			return pushParams(s, "a")
		},
		"P did not know what its leg is for": func(s *simtest.Scene, body simtest.Obj) simtest.Obj {
			require.Equal(s.T, 200, s.Ask(s.P, simtest.With(body, simtest.Obj{"max_tokens": 1}), "X-Request-Id", "a").Status)
			return pushParams(s, "a")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := simtest.New(t, pushing)
			body := simtest.Completion("orphan")
			params := act(s, body)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			got := pushDecode(ctx, s, body, params, "a")
			simtest.WaitFor(t, "D waits", func() bool { return s.D.Stats().Waiting == 1 })
			time.Sleep(time.Second) // D has registered, which P does not show
			assert.Empty(t, got, "it was answered")
			leave()
			require.ErrorIs(t, (<-got).Err, context.Canceled)
			simtest.WaitFor(t, "D has given up", func() bool {
				return s.D.Stats().Running == 0 &&
					s.D.Stats().Waiting == 0
			})
			assert.Equal(t, 240/simtest.Block+1, s.D.Stats().UsedBlocks, "its blocks are lost")
			simtest.WaitFor(t, "they belong to nobody", func() bool { return s.D.CheckKV() != nil })
			s.Alive(s.D)
		})
	}
}

func TestPushWithFieldsThatDoNotFit(t *testing.T) {
	t.Run("an engine id that does not answer there: 500", func(t *testing.T) {
		s := simtest.New(t, pushing)
		body := simtest.Completion("x")
		a := <-pushDecode(t.Context(), s, body, simtest.With(pushParams(s, "a"),
			simtest.Obj{"remote_engine_id": "other"}), "a")
		assert.Equal(t, 500, a.Status)
		s.Alive(s.D)
	})
	for _, key := range []string{"remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id"} {
		t.Run("without "+key+" the engine dies", func(t *testing.T) {
			s := simtest.New(t, pushing, simtest.OwnPorts(t))
			params := pushParams(s, "a")
			delete(params, key)
			a := <-pushDecode(t.Context(), s, simtest.Completion("x"), params, "a")
			assert.Equal(t, 500, a.Status)
			s.Dies(s.D)
		})
	}
	t.Run("a leg that stays away: P's blocks wait for the lease", func(t *testing.T) {
		s := simtest.New(t, pushing, func(p, _ *enginesim.Config) { p.Lease = 50 * time.Millisecond })
		require.Equal(t, 200, pushPrefill(s, simtest.Completion("x"), "a").Status)
		simtest.WaitFor(t, "the lease ends", func() bool { return s.P.Stats().Expired == 1 })
		assert.Equal(t, enginesim.KVLeak, simtest.FirstFault(t, s.P))
	})
}
