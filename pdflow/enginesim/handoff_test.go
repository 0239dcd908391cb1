// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"context"
	"encoding/json"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

const (
	internalError = "Internal server error"
	engineError   = "EngineCore encountered an issue. See stack trace (above) for the root cause."
)

// alive asserts that an engine serves: it is healthy and right.
func (s *scene) alive(e *enginesim.Engine) {
	s.t.Helper()
	assert.Equal(s.t, 200, s.get(e, "/health").status)
	body := completion("still there?")
	assert.Equal(s.t, s.alone(completions, body), s.post(s.t.Context(), e, completions, body).text())
	assert.False(s.t, e.Dead())
}

// dies asserts that an engine's port closes.
func (s *scene) dies(e *enginesim.Engine) {
	s.t.Helper()
	waitFor(s.t, "port refuses", func() bool { return s.get(e, "/health").err != nil })
	assert.True(s.t, e.Dead())
}

// hangs asserts that a decode waits in D and is not answered, and leaves.
func (s *scene) hangs(body, handoff obj) {
	s.t.Helper()
	ctx, leave := context.WithCancel(s.t.Context())
	defer leave()
	got := make(chan answer, 1)
	go func() { got <- s.post(ctx, s.d, completions, with(body, obj{"kv_transfer_params": handoff})) }()
	waitFor(s.t, "D waits", func() bool { return s.d.Stats().Waiting == 1 })
	time.Sleep(50 * time.Millisecond)
	assert.Empty(s.t, got, "it was answered")
	leave()
	require.ErrorIs(s.t, (<-got).err, context.Canceled)
}

func without(key string) func(obj) { return func(h obj) { delete(h, key) } }

func set(key string, value any) func(obj) { return func(h obj) { h[key] = value } }

func ids(h obj) []any { return h["remote_block_ids"].([]any)[0].([]any) }

// TestHandoffsThatWorkAllTheSame are rows of captures/README.md 2.1 in which
// what is changed does not matter (captures 32, 38, 40, 41).
func TestHandoffsThatWorkAllTheSame(t *testing.T) {
	rows := map[string]func(obj){
		"untouched":          func(obj) {},
		"with unknown key":   set("x_future", obj{"a": 1}),
		"transfer_mode push": set("transfer_mode", "push"),
		"both flags":         set("do_remote_decode", true),
	}
	for _, key := range []string{"tp_size", "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode", "remote_blocks_expiry_time", "remote_prefill_cached_tokens", "do_remote_decode"} {
		rows["without "+key] = without(key)
	}
	for name, change := range rows {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			body := completion("x")
			h := s.prefill(completions, body)
			require.Len(t, h, 14)
			change(h)
			a := s.decode(completions, body, h)
			require.Equal(t, 200, a.status, a.body)
			assert.Equal(t, s.alone(completions, body), a.text())
			assert.EqualValues(t, 240, s.d.Stats().ExternalKVTransfer)
			assert.NoError(t, s.p.CheckKV())
		})
	}
}

// TestHandoffsThatGiveWrongText are answered with 200 and no failure counted: the
// engine cannot know (captures 36, 37, 37c).
func TestHandoffsThatGiveWrongText(t *testing.T) {
	t.Run("blocks in another order", func(t *testing.T) {
		s := newScene(t)
		body := completion("x")
		h := s.prefill(completions, body)
		slices.Reverse(ids(h))
		a := s.decode(completions, body, h)
		require.Equal(t, 200, a.status, a.body)
		assert.NotEqual(t, s.alone(completions, body), a.text())
		assert.Zero(t, s.d.Stats().FailedTransfers)
		assert.Equal(t, enginesim.KVForeignRead, firstFault(t, s.p))
	})
	t.Run("another prompt of the same length", func(t *testing.T) {
		s := newScene(t)
		a := s.decode(completions, completion("other"), s.prefill(completions, completion("first")))
		require.Equal(t, 200, a.status, a.body)
		assert.Equal(t, s.alone(completions, completion("first")), a.text(), "the answer to the prefilled prompt")
		assert.Zero(t, s.d.Stats().FailedTransfers)
		assert.Equal(t, enginesim.KVForeignRead, firstFault(t, s.p))
	})
	t.Run("prompt shorter than prefilled", func(t *testing.T) {
		s := newScene(t)
		h := s.prefill(completions, completion("x"))
		shorter := with(completion("x"), obj{"prompt": prompt(240, "x")[:140]})
		a := s.decode(completions, shorter, h)
		require.Equal(t, 200, a.status, a.body)
		assert.NotEqual(t, s.alone(completions, shorter), a.text())
		assert.NotEqual(t, s.alone(completions, completion("x")), a.text())
	})
}

func firstFault(t *testing.T, e *enginesim.Engine) enginesim.KVFaultKind {
	t.Helper()
	var f *enginesim.KVFault
	if !assert.ErrorAs(t, e.CheckKV(), &f) {
		return ""
	}
	return f.Kind
}

// TestHandoffsThatKillDecode make the engine core die: 500, then the port
// refuses (captures 35, 37b, 47, 50, 51f).
func TestHandoffsThatKillDecode(t *testing.T) {
	rows := map[string]func(obj){
		"blocks missing":      without("remote_block_ids"),
		"blocks null":         set("remote_block_ids", nil),
		"blocks empty":        set("remote_block_ids", []any{}),
		"blocks nested empty": set("remote_block_ids", []any{[]any{}}),
		"blocks flat and port a string": func(h obj) {
			h["remote_block_ids"], h["remote_port"] = ids(h), "5600"
		},
		"one block fewer": func(h obj) { h["remote_block_ids"] = []any{ids(h)[:7]} },
		"only the flag": func(h obj) {
			clear(h)
			h["do_remote_prefill"] = true
		},
	}
	for name, change := range rows {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			body := completion("x")
			h := s.prefill(completions, body)
			change(h)
			a := s.decode(completions, body, h)
			assert.Equal(t, 500, a.status)
			assert.Equal(t, engineError, a.get("error.message").String())
			s.dies(s.d)
		})
	}
	t.Run("prompt longer than the blocks", func(t *testing.T) {
		s := newScene(t)
		h := s.prefill(completions, completion("x"))
		a := s.decode(completions, with(completion("x"), obj{"prompt": prompt(280, "x")}), h)
		assert.Equal(t, 500, a.status)
		assert.Equal(t, engineError, a.get("error.message").String())
		s.dies(s.d)
	})
}

// TestHandoffsThatHangAndKill wait until the client leaves; the abort then kills
// the engine, which answers 503 and 500 for a while (captures 51, 51b to 51d).
func TestHandoffsThatHangAndKill(t *testing.T) {
	for _, key := range []string{"remote_engine_id", "remote_host", "remote_port", "remote_request_id"} {
		t.Run("without "+key, func(t *testing.T) {
			s := newScene(t, func(_, d *enginesim.Config) { d.ExitDelay = 400 * time.Millisecond })
			body := completion("x")
			h := s.prefill(completions, body)
			delete(h, key)
			s.hangs(body, h)
			waitFor(t, "503 on /health", func() bool { return s.get(s.d, "/health").status == 503 })
			a := s.post(t.Context(), s.d, completions, body)
			assert.Equal(t, 500, a.status)
			assert.Equal(t, engineError, a.get("error.message").String())
			s.dies(s.d)
		})
	}
}

// TestHandoffWithSwappedFlagsHangs and does no other harm (capture 39).
func TestHandoffWithSwappedFlagsHangs(t *testing.T) {
	s := newScene(t)
	body := completion("x")
	h := s.prefill(completions, body)
	h["do_remote_prefill"], h["do_remote_decode"] = false, true
	s.hangs(body, h)
	s.alive(s.d)
	waitFor(t, "abort", func() bool { return s.d.Stats().Aborted == 1 })
}

// TestLoadsThatFail answer 500 under the policy fail and 200 with the right text,
// computed here, under recompute (captures 30, 31, 42, 43, 51e, 58).
func TestLoadsThatFail(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	at := func(ln net.Listener) func(obj) {
		return func(h obj) {
			h["remote_port"] = ln.Addr().(*net.TCPAddr).Port
			h["remote_engine_id"] = "11111111-0000-0000-0000-000000000000"
		}
	}
	rows := []struct {
		name   string
		change func(obj)
		failed int64
		slow   bool // the handshake's time-out passes first
	}{
		{"wrong engine id", set("remote_engine_id", "00000000-0000-0000-0000-000000000000"), 1, false},
		{"block ids out of range", func(h obj) {
			for i := range ids(h) {
				ids(h)[i] = 9999999
			}
		}, 2, false},
		{"null host", set("remote_host", nil), 1, true},
		{"port closed", at(closed), 1, true},
		{"port silent", at(silent), 1, true},
	}
	for _, row := range rows {
		for _, policy := range []string{enginesim.LoadFailureFail, enginesim.LoadFailureRecompute} {
			t.Run(row.name+" "+policy, func(t *testing.T) {
				s := newScene(t, func(_, d *enginesim.Config) {
					if d.LoadFailure = policy; !row.slow {
						d.HandshakeTimeout = time.Hour // nothing may wait for it
					}
				})
				body := completion("x")
				h := s.prefill(completions, body)
				row.change(h)
				begun := time.Now()
				a := s.decode(completions, body, h)
				if row.slow {
					assert.GreaterOrEqual(t, time.Since(begun), 300*time.Millisecond, "waits for the handshake")
				}
				stats := s.d.Stats()
				assert.Equal(t, row.failed, stats.FailedTransfers)
				assert.Zero(t, stats.ExternalKVTransfer)
				if policy == enginesim.LoadFailureFail {
					assert.Equal(t, 500, a.status)
					assert.Equal(t, internalError, a.get("error.message").String())
				} else {
					assert.Equal(t, 200, a.status)
					assert.Equal(t, s.alone(completions, body), a.text())
					assert.EqualValues(t, 240, stats.LocalCompute)
				}
				assert.Equal(t, 8, s.p.Stats().PinnedBlocks, "P's blocks stay until the lease ends (capture 57)")
				s.alive(s.d)
			})
		}
	}
}

// TestEnginesThatDoNotMatch refuse each other's KV at the handshake.
func TestEnginesThatDoNotMatch(t *testing.T) {
	for name, shape := range map[string]func(p, d *enginesim.Config){
		"seed":  func(_, d *enginesim.Config) { d.Seed = 7 },
		"shape": func(p, d *enginesim.Config) { p.BytesPerToken, d.BytesPerToken = 16, 8 },
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, shape)
			a := s.decode(completions, completion("x"), s.prefill(completions, completion("x")))
			assert.Equal(t, 500, a.status)
			assert.EqualValues(t, 1, s.d.Stats().FailedTransfers)
		})
	}
}

// TestDecodeEngineKilledWhileItWaits tells P nothing: the lease has to end.
func TestDecodeEngineKilledWhileItWaits(t *testing.T) {
	s := newScene(t)
	warm := completion("warm")
	require.Equal(t, 200, s.decode(completions, warm, s.prefill(completions, warm)).status)
	h := s.prefill(completions, completion("x"))
	s.p.Freeze()
	got := make(chan answer)
	go func() { got <- s.decode(completions, completion("x"), h) }()
	waitFor(t, "D waits", func() bool { return s.d.Stats().Waiting == 1 })
	s.d.Kill()
	assert.Error(t, (<-got).err)
	s.p.Thaw()
	time.Sleep(20 * time.Millisecond)
	assert.Equal(t, 8, s.p.Stats().PinnedBlocks)
}

// TestClientLeavesDuringHandshake (capture 44).
func TestClientLeavesDuringHandshake(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	s := newScene(t, func(_, d *enginesim.Config) { d.HandshakeTimeout = time.Minute })
	body := completion("x")
	h := s.prefill(completions, body)
	h["remote_port"], h["remote_engine_id"] = silent.Addr().(*net.TCPAddr).Port, "33333333-0000-0000-0000-000000000000"
	s.hangs(body, h)
	waitFor(t, "the request to be aborted", func() bool { return s.d.Stats().Aborted == 1 })
	assert.Zero(t, s.d.Stats().UsedBlocks)
	s.alive(s.d)
}

// TestUnknownRequestID reads the right blocks, but P does not learn that they
// were read (capture 33).
func TestUnknownRequestID(t *testing.T) {
	s := newScene(t)
	body := completion("x")
	h := s.prefill(completions, body)
	h["remote_request_id"] = "cmpl-nobody-0-00000000"
	a := s.decode(completions, body, h)
	assert.Equal(t, s.alone(completions, body), a.text())
	stats := s.p.Stats()
	assert.EqualValues(t, 1, stats.AfterExpiry)
	assert.Equal(t, 8, stats.PinnedBlocks)
	assert.Equal(t, enginesim.KVStaleRead, firstFault(t, s.p))
}

// TestHandoffUsedTwice is right while P has not reused the blocks (captures 34
// and 34b), and wrong when it has.
func TestHandoffUsedTwice(t *testing.T) {
	small := func(p, d *enginesim.Config) { p.Blocks, p.MaxModelLen, d.Blocks, d.MaxModelLen = 24, 768, 64, 768 }
	for _, reused := range []bool{false, true} {
		t.Run(map[bool]string{false: "at once", true: "after reuse"}[reused], func(t *testing.T) {
			s := newScene(t, small)
			body := completion("x")
			h := s.prefill(completions, body)
			right := s.alone(completions, body)
			assert.Equal(t, right, s.decode(completions, body, h).text())
			if reused {
				s.fill(s.p, 6)
			}
			// Another salt, so that D's own cache cannot answer.
			a := s.decode(completions, with(body, obj{"cache_salt": "second"}), h)
			require.Equal(t, 200, a.status)
			assert.Equal(t, !reused, a.text() == right)
			assert.EqualValues(t, 1, s.p.Stats().AfterExpiry)
			assert.Zero(t, s.d.Stats().FailedTransfers)
			assert.Equal(t, enginesim.KVDoubleUse, firstFault(t, s.p))
		})
	}
}

// fill overwrites an engine's free blocks with other prompts.
func (s *scene) fill(e *enginesim.Engine, prompts int) {
	s.t.Helper()
	for i := range prompts {
		require.Equal(s.t, 200, s.post(s.t.Context(), e, completions, completion("filler "+string(rune('a'+i)))).status)
	}
}

// TestExpiredHandoff is right while the memory is untouched (capture 46) and
// wrong when other prompts have taken the blocks (capture 60); D notices neither.
func TestExpiredHandoff(t *testing.T) {
	for _, reused := range []bool{false, true} {
		t.Run(map[bool]string{false: "untouched", true: "reused"}[reused], func(t *testing.T) {
			s := newScene(t, func(p, d *enginesim.Config) {
				p.Blocks, p.MaxModelLen, p.Lease = 24, 768, 300*time.Millisecond
			})
			body := completion("x")
			h := s.prefill(completions, body)
			assert.Equal(t, 8, s.p.Stats().PinnedBlocks)
			waitFor(t, "the lease to end", func() bool { return s.p.Stats().PinnedBlocks == 0 })
			if reused {
				s.fill(s.p, 6)
			}
			a := s.decode(completions, body, h)
			require.Equal(t, 200, a.status)
			assert.Equal(t, !reused, a.text() == s.alone(completions, body))
			p, d := s.p.Stats(), s.d.Stats()
			assert.EqualValues(t, 1, p.Expired)
			assert.EqualValues(t, 1, p.AfterExpiry)
			assert.EqualValues(t, 1, d.Transfers, "D counts a normal transfer")
			assert.Zero(t, d.FailedTransfers)
			assert.Equal(t, enginesim.KVLeak, firstFault(t, s.p))
		})
	}
}

// TestPrefillEngineGone: killed after its answer (captures 52, 59), restarted on
// the same ports (53).
func TestPrefillEngineGone(t *testing.T) {
	for _, policy := range []string{enginesim.LoadFailureFail, enginesim.LoadFailureRecompute} {
		t.Run("killed "+policy, func(t *testing.T) {
			s := newScene(t, func(_, d *enginesim.Config) { d.LoadFailure, d.HandshakeTimeout = policy, time.Minute })
			warm := completion("warm")
			require.Equal(t, 200, s.decode(completions, warm, s.prefill(completions, warm)).status)
			body := completion("x")
			h := s.prefill(completions, body)
			s.p.Kill()
			a := s.decode(completions, body, h)
			stats := s.d.Stats()
			assert.EqualValues(t, 2, stats.FailedTransfers)
			assert.EqualValues(t, 1, stats.FailedNotifications)
			if policy == enginesim.LoadFailureFail {
				assert.Equal(t, 500, a.status)
				assert.Equal(t, internalError, a.get("error.message").String())
			} else {
				assert.Equal(t, s.alone(completions, body), a.text())
			}
			s.alive(s.d)
		})
	}
	t.Run("restarted", func(t *testing.T) {
		s := newScene(t)
		body := completion("x")
		h, id, url := s.prefill(completions, body), s.p.EngineID(), s.p.URL()
		require.NoError(t, s.p.Restart())
		s.http.CloseIdleConnections() // those of the life before
		assert.NotEqual(t, id, s.p.EngineID())
		assert.Equal(t, url, s.p.URL())
		assert.Equal(t, 500, s.decode(completions, body, h).status)
		again := s.prefill(completions, body)
		assert.Equal(t, h["remote_port"], again["remote_port"])
		assert.Equal(t, s.alone(completions, body), s.decode(completions, body, again).text())
	})
}

// TestPrefillEngineFrozen: D waits as long as its client does, and P lets go when
// it runs again (capture 54).
func TestPrefillEngineFrozen(t *testing.T) {
	s := newScene(t)
	warm := completion("warm")
	require.Equal(t, 200, s.decode(completions, warm, s.prefill(completions, warm)).status)
	body := completion("x")
	h := s.prefill(completions, body)
	s.p.Freeze()
	s.hangs(body, h)
	s.alive(s.d)
	s.p.Thaw()
	waitFor(t, "P lets go", func() bool { return s.p.Stats().PinnedBlocks == 0 })
	assert.Zero(t, s.p.Stats().Expired)
	fresh := completion("fresh")
	assert.Equal(t, s.alone(completions, fresh), s.decode(completions, fresh, s.prefill(completions, fresh)).text())
}

// TestRejectedDecodeConsumesTheHandoff (capture 25), but for one whose params are
// no object.
func TestRejectedDecodeConsumesTheHandoff(t *testing.T) {
	rows := map[string]struct {
		change obj
		status int
	}{
		"unknown model":     {obj{"model": "nope"}, 404},
		"prompt too long":   {obj{"prompt": prompt(3000, "x")}, 400},
		"max_tokens 0":      {obj{"max_tokens": 0}, 400},
		"min_tokens":        {obj{"min_tokens": 99}, 400},
		"n with greedy":     {obj{"n": 2}, 400},
		"stream_options":    {obj{"stream_options": obj{"include_usage": true}}, 400},
		"too many together": {obj{"max_tokens": 2000}, 400},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			body := completion("x")
			h := s.prefill(completions, body)
			require.Equal(t, 8, s.p.Stats().PinnedBlocks)
			assert.Equal(t, row.status, s.decode(completions, with(body, row.change), h).status)
			assert.Zero(t, s.p.Stats().PinnedBlocks)
			assert.EqualValues(t, 0, s.p.Stats().AfterExpiry)
		})
	}
	t.Run("params of the wrong type", func(t *testing.T) {
		s := newScene(t)
		s.prefill(completions, completion("x"))
		for _, params := range []any{"abc", []int{1}, 5, true} {
			a := s.post(t.Context(), s.d, completions, with(completion("x"), obj{"kv_transfer_params": params}))
			assert.Equal(t, 400, a.status)
			assert.Contains(t, a.get("error.message").String(), "dict_type")
		}
		assert.Equal(t, 8, s.p.Stats().PinnedBlocks)
	})
}

// TestUnreadHandoffsFillTheCache: the fourth prefill waits for the lease of the
// first (capture 61).
func TestUnreadHandoffsFillTheCache(t *testing.T) {
	const lease = 600 * time.Millisecond
	s := newScene(t, func(p, _ *enginesim.Config) { p.Blocks, p.MaxModelLen, p.Lease = 24, 768, lease })
	begun := time.Now()
	for _, name := range []string{"a", "b", "c"} {
		s.prefill(completions, completion(name))
	}
	assert.Less(t, time.Since(begun), lease)
	assert.InDelta(t, 1, s.counters(s.p)["vllm:kv_cache_usage_perc"], 1e-9)
	s.prefill(completions, completion("d"))
	assert.GreaterOrEqual(t, time.Since(begun), lease)
	assert.GreaterOrEqual(t, s.p.Stats().Expired, int64(1))
}

// TestHeartbeatKeepsTheLease while the decode stands in D's queue; it does not
// without tp_size (protocols/vllm.md 1.5).
func TestHeartbeatKeepsTheLease(t *testing.T) {
	for _, heartbeat := range []bool{true, false} {
		t.Run(map[bool]string{true: "with", false: "without"}[heartbeat]+" tp_size", func(t *testing.T) {
			const lease = 600 * time.Millisecond
			s := newScene(t, func(p, d *enginesim.Config) {
				p.Lease, d.Lease = lease, lease
				d.MaxRunning, d.ITL = 1, 10*time.Millisecond
			})
			busy, stop := context.WithCancel(t.Context())
			defer stop()
			left := make(chan struct{})
			go func() {
				defer close(left)
				s.post(busy, s.d, completions, with(completion("long"), obj{"max_tokens": 1500}))
			}()
			waitFor(t, "D is busy", func() bool { return s.d.Stats().Running == 1 })
			h := s.prefill(completions, completion("x"))
			if !heartbeat {
				delete(h, "tp_size")
			}
			decoded := make(chan answer)
			go func() { decoded <- s.decode(completions, with(completion("x"), obj{"max_tokens": 2}), h) }()
			waitFor(t, "D's queue", func() bool { return s.d.Stats().Waiting == 1 })
			time.Sleep(lease * 4 / 3)
			assert.Equal(t, heartbeat, s.p.Stats().Expired == 0)
			stop()
			<-left
			assert.Equal(t, 200, (<-decoded).status)
		})
	}
}

// TestDecodeDroppedFromTheQueueReleases: an abort before the load tells P.
func TestDecodeDroppedFromTheQueueReleases(t *testing.T) {
	s := newScene(t, func(_, d *enginesim.Config) { d.MaxRunning, d.ITL = 1, 10*time.Millisecond })
	busy, stop := context.WithCancel(t.Context())
	left := make(chan struct{})
	go func() {
		defer close(left)
		s.post(busy, s.d, completions, with(completion("long"), obj{"max_tokens": 1500}))
	}()
	waitFor(t, "D is busy", func() bool { return s.d.Stats().Running == 1 })
	s.hangs(completion("x"), s.prefill(completions, completion("x")))
	waitFor(t, "P lets go", func() bool { return s.p.Stats().PinnedBlocks == 0 })
	stop()
	<-left
}

// TestStreamedPrefillPinsForNobody: its chunks carry no handoff (captures 04).
func TestStreamedPrefillPinsForNobody(t *testing.T) {
	s := newScene(t)
	a := s.post(t.Context(), s.p, completions, with(completion("x"), obj{"max_tokens": 1, "stream": true, "kv_transfer_params": obj{"do_remote_decode": true}}))
	assert.NotContains(t, a.body, "kv_transfer_params")
	assert.Equal(t, 8, s.p.Stats().PinnedBlocks)
	require.NoError(t, s.p.WaitIdle(t.Context()))
	assert.Equal(t, enginesim.KVLeak, firstFault(t, s.p))
}

// TestDecodeWithoutTransferIsTold by D's metrics and its ledger.
func TestDecodeWithoutTransferIsTold(t *testing.T) {
	s := newScene(t)
	for _, params := range []any{nil, obj{}} {
		body := completion("x")
		a := s.post(t.Context(), s.d, completions, with(body, obj{"kv_transfer_params": params, "cache_salt": "s"}))
		assert.Equal(t, s.alone(completions, body), a.text())
	}
	stats := s.d.Stats()
	assert.EqualValues(t, 240+16, stats.LocalCompute)
	assert.Zero(t, stats.ExternalKVTransfer)
	assert.Equal(t, enginesim.KVNoTransfer, firstFault(t, s.d))
}

// TestCheckKVJoinsEveryFault so that a test sees all of them.
func TestCheckKVJoinsEveryFault(t *testing.T) {
	s := newScene(t)
	body := completion("x")
	h := s.prefill(completions, body)
	for range 3 {
		s.decode(completions, body, h)
	}
	joined, ok := s.p.CheckKV().(interface{ Unwrap() []error })
	require.True(t, ok)
	assert.Len(t, joined.Unwrap(), 2)
	var f *enginesim.KVFault
	require.ErrorAs(t, s.p.CheckKV(), &f)
	assert.Equal(t, s.p.EngineID(), f.Engine)
	id, err := json.Marshal(h["remote_request_id"])
	require.NoError(t, err)
	assert.Contains(t, string(id), f.Request)
}
