// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func ids(h simtest.Obj) []any { return h["remote_block_ids"].([]any)[0].([]any) }

// TestHandoffsThatWorkAllTheSame are rows of docs/protocols/nixl.md §3 in which what is changed does not matter
// (recordings 32, 38, 40, 41).
func TestHandoffsThatWorkAllTheSame(t *testing.T) {
	rows := map[string]func(simtest.Obj){
		"untouched":          func(simtest.Obj) {},
		"with unknown key":   simtest.Set("x_future", simtest.Obj{"a": 1}),
		"transfer_mode push": simtest.Set("transfer_mode", "push"),
		"both flags":         simtest.Set("do_remote_decode", true),
	}
	for _, key := range []string{"tp_size", "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode",
		"remote_blocks_expiry_time", "remote_prefill_cached_tokens", "do_remote_decode"} {
		rows["without "+key] = simtest.Without(key)
	}
	for name, change := range rows {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t)
			body := simtest.Completion("x")
			h := s.Prefill(body)
			require.Len(t, h, 14)
			change(h)
			s.Right(body, s.Decode(body, h))
			assert.EqualValues(t, 240, s.D.Stats().ExternalKVTransfer)
			assert.NoError(t, s.P.CheckKV())
		})
	}
}

// TestHandoffsThatGiveWrongText are answered with 200 and no failure counted: the engine cannot know
// (docs/protocols/nixl.md, recordings 36, 37, 37c).
func TestHandoffsThatGiveWrongText(t *testing.T) {
	x, first := simtest.Completion("x"), simtest.Completion("first")
	shorter := simtest.With(x, simtest.Obj{"prompt": simtest.Prompt(240, "x")[:140]})
	for name, k := range map[string]struct {
		prefill, decode simtest.Obj
		change          func(simtest.Obj)
		same            bool // the text is the one of the prompt that was prefilled
	}{
		"blocks in another order":             {x, x, func(h simtest.Obj) { slices.Reverse(ids(h)) }, false},
		"another prompt of the same length":   {first, simtest.Completion("other"), nil, true},
		"a prompt shorter than the prefilled": {x, shorter, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t)
			h := s.Prefill(k.prefill)
			if k.change != nil {
				k.change(h)
			}
			a := s.Decode(k.decode, h)
			require.Equal(t, 200, a.Status, a.Body)
			assert.NotEqual(t, s.Alone(k.decode), a.Text())
			assert.Equal(t, k.same, s.Alone(k.prefill) == a.Text())
			assert.Zero(t, s.D.Stats().FailedTransfers)
			assert.Equal(t, enginesim.KVForeignRead, simtest.FirstFault(t, s.P))
		})
	}
}

// TestHandoffsThatKillDecode make the engine core die: 500, then the port refuses (docs/protocols/nixl.md, recordings
// 35, 37b, 47, 50, 51f).
func TestHandoffsThatKillDecode(t *testing.T) {
	rows := map[string]func(simtest.Obj){
		"blocks missing":      simtest.Without("remote_block_ids"),
		"blocks null":         simtest.Set("remote_block_ids", nil),
		"blocks empty":        simtest.Set("remote_block_ids", []any{}),
		"blocks nested empty": simtest.Set("remote_block_ids", []any{[]any{}}),
		"blocks flat and port a string": func(h simtest.Obj) {
			h["remote_block_ids"], h["remote_port"] = ids(h), "5600"
		},
		"one block fewer": func(h simtest.Obj) { h["remote_block_ids"] = []any{ids(h)[:7]} },
		"only the flag": func(h simtest.Obj) {
			clear(h)
			h["do_remote_prefill"] = true
		},
	}
	for name, change := range rows {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, simtest.OwnPorts(t))
			body := simtest.Completion("x")
			h := s.Prefill(body)
			change(h)
			s.Kills(s.D, s.Decode(body, h))
		})
	}
	t.Run("prompt longer than the blocks", func(t *testing.T) {
		s := simtest.New(t, simtest.OwnPorts(t))
		h := s.Prefill(simtest.Completion("x"))
		longer := simtest.With(simtest.Completion("x"), simtest.Obj{"prompt": simtest.Prompt(280, "x")})
		s.Kills(s.D, s.Decode(longer, h))
	})
}

// TestHandoffsThatHangAndKill wait until the client leaves; the abort then kills the engine, which answers 503 and 500
// for a while (docs/protocols/nixl.md, recordings 51, 51b, 51c, 51d).
func TestHandoffsThatHangAndKill(t *testing.T) {
	for _, key := range []string{"remote_engine_id", "remote_host", "remote_port", "remote_request_id"} {
		t.Run("without "+key, func(t *testing.T) {
			t.Parallel()
			s := simtest.New(t, func(_, d *enginesim.Config) { d.ExitDelay = 3 * time.Second }, simtest.OwnPorts(t))
			body := simtest.Completion("x")
			h := s.Prefill(body)
			delete(h, key)
			s.Hangs(body, h)
			simtest.WaitFor(t, "503 on /health", func() bool { return s.Get(s.D, "/health").Status == 503 })
			s.Kills(s.D, s.Ask(s.D, body))
		})
	}
}

// TestHandoffWithSwappedFlagsHangs and does no other harm (docs/protocols/nixl.md, recording 39).
func TestHandoffWithSwappedFlagsHangs(t *testing.T) {
	s := simtest.New(t)
	body := simtest.Completion("x")
	h := s.Prefill(body)
	h["do_remote_prefill"], h["do_remote_decode"] = false, true
	s.Hangs(body, h)
	s.Alive(s.D)
	simtest.WaitFor(t, "abort", func() bool { return s.D.Stats().Aborted == 1 })
}

// TestLoadsThatFail answer 500 under the policy fail and 200 with the right text, computed here, under recompute
// (docs/protocols/nixl.md, recordings 30, 31, 42, 43, 51e, 58).
func TestLoadsThatFail(t *testing.T) {
	closed, err := freeport.Find(1)
	require.NoError(t, err)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	at := func(port int) func(simtest.Obj) {
		return func(h simtest.Obj) {
			h["remote_port"] = port
			h["remote_engine_id"] = "11111111-0000-0000-0000-000000000000"
		}
	}
	rows := []struct {
		name   string
		change func(simtest.Obj)
		failed int64
		slow   bool // the handshake's time-out passes first
	}{
		{"wrong engine id", simtest.Set("remote_engine_id", "00000000-0000-0000-0000-000000000000"), 1, false},
		{"block ids out of range", func(h simtest.Obj) {
			for i := range ids(h) {
				ids(h)[i] = 9999999
			}
		}, 2, false},
		{"null host", simtest.Set("remote_host", nil), 1, true},
		{"port closed", at(closed), 1, true},
		{"port silent", at(silent.Addr().(*net.TCPAddr).Port), 1, true},
	}
	for _, row := range rows {
		for _, policy := range []string{enginesim.LoadFailureFail, enginesim.LoadFailureRecompute} {
			t.Run(row.name+" "+policy, func(t *testing.T) {
				s := simtest.New(t, func(_, d *enginesim.Config) {
					d.LoadFailure, d.HandshakeTimeout = policy, time.Hour // nothing may wait for it
					if row.slow {
						d.HandshakeTimeout = 300 * time.Millisecond
					}
				})
				body := simtest.Completion("x")
				h := s.Prefill(body)
				row.change(h)
				begun := time.Now()
				a := s.Decode(body, h)
				if row.slow {
					assert.GreaterOrEqual(t, time.Since(begun), 300*time.Millisecond, "waits for the handshake")
				}
				stats := s.D.Stats()
				assert.Equal(t, row.failed, stats.FailedTransfers)
				assert.Zero(t, stats.ExternalKVTransfer)
				s.LoadFails(policy, body, a)
				computed := map[string]int64{enginesim.LoadFailureRecompute: 240}[policy]
				assert.Equal(t, computed, stats.LocalCompute)
				assert.Equal(t, 8, s.P.Stats().PinnedBlocks, "P's blocks stay until the lease ends, as in recording 57")
				s.Alive(s.D)
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
			s := simtest.New(t, shape)
			assert.Equal(t, 500, s.Pair(simtest.Completion("x")).Status)
			assert.EqualValues(t, 1, s.D.Stats().FailedTransfers)
		})
	}
}

// TestDecodeEngineKilledWhileItWaits tells P nothing: the lease has to end.
func TestDecodeEngineKilledWhileItWaits(t *testing.T) {
	s := simtest.New(t)
	require.Equal(t, 200, s.Pair(simtest.Completion("warm")).Status)
	h := s.Prefill(simtest.Completion("x"))
	s.P.Freeze()
	got := s.AskLater(s.D, simtest.Leg(simtest.Completion("x"), h))
	simtest.WaitFor(t, "D waits", func() bool { return s.D.Stats().Waiting == 1 })
	s.D.Kill()
	assert.Error(t, (<-got).Err)
	s.P.Thaw()
	time.Sleep(20 * time.Millisecond)
	assert.Equal(t, 8, s.P.Stats().PinnedBlocks)
}

// TestClientLeavesDuringHandshake (docs/protocols/nixl.md, recording 44).
func TestClientLeavesDuringHandshake(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	s := simtest.New(t, func(_, d *enginesim.Config) { d.HandshakeTimeout = time.Minute })
	body := simtest.Completion("x")
	h := s.Prefill(body)
	h["remote_port"], h["remote_engine_id"] = silent.Addr().(*net.TCPAddr).Port, "33333333-0000-0000-0000-000000000000"
	s.Hangs(body, h)
	simtest.WaitFor(t, "the request to be aborted", func() bool { return s.D.Stats().Aborted == 1 })
	assert.Zero(t, s.D.Stats().UsedBlocks)
	s.Alive(s.D)
}

// TestUnknownRequestID reads the right blocks, but P does not learn that they were read (docs/protocols/nixl.md,
// recording 33).
func TestUnknownRequestID(t *testing.T) {
	s := simtest.New(t)
	body := simtest.Completion("x")
	h := s.Prefill(body)
	h["remote_request_id"] = "cmpl-nobody-0-00000000"
	s.Right(body, s.Decode(body, h))
	stats := s.P.Stats()
	assert.EqualValues(t, 1, stats.AfterExpiry)
	assert.Equal(t, 8, stats.PinnedBlocks)
	assert.Equal(t, enginesim.KVStaleRead, simtest.FirstFault(t, s.P))
}

// TestHandoffOfBlocksThatWereLetGo: they are used twice (docs/protocols/nixl.md, recordings 34 and 34b), or after the
// lease (46, 60). The text is right while the memory is untouched, and wrong when other prompts have taken the blocks.
// D notices neither.
func TestHandoffOfBlocksThatWereLetGo(t *testing.T) {
	for name, k := range map[string]struct {
		twice, reused bool
		fault         enginesim.KVFaultKind
	}{
		"used twice":            {true, false, enginesim.KVDoubleUse},
		"used twice and reused": {true, true, enginesim.KVDoubleUse},
		"expired":               {false, false, enginesim.KVLeak},
		"expired and reused":    {false, true, enginesim.KVLeak},
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, func(p, d *enginesim.Config) {
				p.Blocks, p.MaxModelLen, d.Blocks, d.MaxModelLen = 24, 768, 64, 768
				if !k.twice {
					p.Lease = time.Second
				}
			})
			body, transfers := simtest.Completion("x"), 1
			h := s.Prefill(body)
			assert.Equal(t, 8, s.P.Stats().PinnedBlocks)
			if k.twice {
				s.Right(body, s.Decode(body, h))
				transfers = 2
			}
			simtest.WaitFor(t, "P lets go", func() bool { return s.P.Stats().PinnedBlocks == 0 })
			for i := 0; k.reused && i < 6; i++ { // overwrite its free blocks
				require.Equal(t, 200, s.Ask(s.P, simtest.Completion("filler "+string(rune('a'+i)))).Status)
			}
			// Another salt, so that D's own cache cannot answer.
			a := s.Decode(simtest.With(body, simtest.Obj{"cache_salt": "second"}), h)
			require.Equal(t, 200, a.Status)
			assert.Equal(t, !k.reused, a.Text() == s.Alone(body))
			p, d := s.P.Stats(), s.D.Stats()
			assert.Equal(t, map[bool]int64{false: 1}[k.twice], p.Expired)
			assert.EqualValues(t, 1, p.AfterExpiry)
			assert.EqualValues(t, transfers, d.Transfers, "D counts a normal transfer")
			assert.Zero(t, d.FailedTransfers)
			assert.Equal(t, k.fault, simtest.FirstFault(t, s.P))
		})
	}
}

// TestPrefillEngineGone: killed after its response (docs/protocols/nixl.md, recordings 52, 59), restarted on the same
// ports (53).
func TestPrefillEngineGone(t *testing.T) {
	for _, policy := range []string{enginesim.LoadFailureFail, enginesim.LoadFailureRecompute} {
		t.Run("killed "+policy, func(t *testing.T) {
			s := simtest.New(t, func(_, d *enginesim.Config) {
				d.LoadFailure, d.HandshakeTimeout = policy, time.Minute
			}, simtest.OwnPorts(t))
			require.Equal(t, 200, s.Pair(simtest.Completion("warm")).Status)
			body := simtest.Completion("x")
			h := s.Prefill(body)
			s.P.Kill()
			a := s.Decode(body, h)
			stats := s.D.Stats()
			assert.EqualValues(t, 2, stats.FailedTransfers)
			assert.EqualValues(t, 1, stats.FailedNotifications)
			s.LoadFails(policy, body, a)
			s.Alive(s.D)
		})
	}
	t.Run("restarted", func(t *testing.T) {
		s := simtest.New(t, simtest.OwnPorts(t))
		body := simtest.Completion("x")
		h, id, url := s.Prefill(body), s.P.EngineID(), s.P.URL()
		require.NoError(t, s.P.Restart())
		s.HTTP.CloseIdleConnections() // those of the life before
		assert.NotEqual(t, id, s.P.EngineID())
		assert.Equal(t, url, s.P.URL())
		assert.Equal(t, 500, s.Decode(body, h).Status)
		again := s.Prefill(body)
		assert.Equal(t, h["remote_port"], again["remote_port"])
		s.Right(body, s.Decode(body, again))
	})
}

// TestPrefillEngineFrozen: D waits as long as its client does, and P lets go when it runs again
// (docs/protocols/nixl.md, recording 54).
func TestPrefillEngineFrozen(t *testing.T) {
	s := simtest.New(t)
	require.Equal(t, 200, s.Pair(simtest.Completion("warm")).Status)
	body := simtest.Completion("x")
	h := s.Prefill(body)
	s.P.Freeze()
	leave := s.Waits(simtest.Leg(body, h))
	time.Sleep(time.Second) // P, which is frozen, does not show that it was asked
	leave()
	s.Alive(s.D)
	s.P.Thaw()
	simtest.WaitFor(t, "P lets go", func() bool { return s.P.Stats().PinnedBlocks == 0 })
	assert.Zero(t, s.P.Stats().Expired)
	fresh := simtest.Completion("fresh")
	s.Right(fresh, s.Pair(fresh))
}

// TestRejectedDecodeConsumesTheHandoff (docs/protocols/nixl.md, recording 25), but for one whose params are no object.
func TestRejectedDecodeConsumesTheHandoff(t *testing.T) {
	rows := map[string]struct {
		change simtest.Obj
		status int
	}{
		"unknown model":     {simtest.Obj{"model": "nope"}, 404},
		"prompt too long":   {simtest.Obj{"prompt": simtest.Prompt(3000, "x")}, 400},
		"max_tokens 0":      {simtest.Obj{"max_tokens": 0}, 400},
		"min_tokens":        {simtest.Obj{"min_tokens": 99}, 400},
		"n with greedy":     {simtest.Obj{"n": 2}, 400},
		"stream_options":    {simtest.Obj{"stream_options": simtest.Obj{"include_usage": true}}, 400},
		"too many together": {simtest.Obj{"max_tokens": 2000}, 400},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t)
			body := simtest.Completion("x")
			h := s.Prefill(body)
			require.Equal(t, 8, s.P.Stats().PinnedBlocks)
			assert.Equal(t, row.status, s.Decode(simtest.With(body, row.change), h).Status)
			assert.Zero(t, s.P.Stats().PinnedBlocks)
			assert.EqualValues(t, 0, s.P.Stats().AfterExpiry)
		})
	}
	t.Run("params of the wrong type", func(t *testing.T) {
		s := simtest.New(t)
		s.Prefill(simtest.Completion("x"))
		for _, params := range []any{"abc", []int{1}, 5, true} {
			a := s.Ask(s.D, simtest.With(simtest.Completion("x"), simtest.Obj{"kv_transfer_params": params}))
			assert.Equal(t, 400, a.Status)
			assert.Contains(t, a.Get("error.message").String(), "dict_type")
		}
		assert.Equal(t, 8, s.P.Stats().PinnedBlocks)
	})
}

// TestUnreadHandoffsFillTheCache: the fourth prefill waits for the lease of the first (docs/protocols/nixl.md,
// recording 61).
func TestUnreadHandoffsFillTheCache(t *testing.T) {
	const lease = 2 * time.Second
	s := simtest.New(t, func(p, _ *enginesim.Config) { p.Blocks, p.MaxModelLen, p.Lease = 24, 768, lease })
	begun := time.Now()
	for _, name := range []string{"a", "b", "c"} {
		s.Prefill(simtest.Completion(name))
	}
	assert.Less(t, time.Since(begun), lease)
	assert.InDelta(t, 1, s.Counters(s.P)["vllm:kv_cache_usage_perc"], 1e-9)
	s.Prefill(simtest.Completion("d"))
	assert.GreaterOrEqual(t, time.Since(begun), lease)
	assert.GreaterOrEqual(t, s.P.Stats().Expired, int64(1))
}

// TestHeartbeatKeepsTheLease while the decode stands in D's queue; it does not without tp_size (docs/protocols/nixl.md
// §4).
func TestHeartbeatKeepsTheLease(t *testing.T) {
	for _, heartbeat := range []bool{true, false} {
		t.Run(map[bool]string{true: "with", false: "without"}[heartbeat]+" tp_size", func(t *testing.T) {
			t.Parallel()
			const lease = 2 * time.Second
			s := simtest.New(t, func(p, d *enginesim.Config) {
				p.Lease, d.Lease = lease, lease
				d.MaxRunning, d.ITL = 1, 10*time.Millisecond
			})
			stop := s.Busy()
			h := s.Prefill(simtest.Completion("x"))
			if !heartbeat {
				delete(h, "tp_size")
			}
			decoded := s.AskLater(s.D, simtest.With(simtest.Completion("x"),
				simtest.Obj{"max_tokens": 2, "kv_transfer_params": h}))
			simtest.WaitFor(t, "D's queue", func() bool { return s.D.Stats().Waiting == 1 })
			if heartbeat {
				time.Sleep(lease * 4 / 3)
				assert.Zero(t, s.P.Stats().Expired)
			} else {
				simtest.WaitFor(t, "the lease to end", func() bool { return s.P.Stats().Expired == 1 })
			}
			stop()
			assert.Equal(t, 200, (<-decoded).Status)
		})
	}
}

// TestDecodeDroppedFromTheQueueReleases: an abort before the load tells P.
func TestDecodeDroppedFromTheQueueReleases(t *testing.T) {
	s := simtest.New(t, func(_, d *enginesim.Config) { d.MaxRunning, d.ITL = 1, 10*time.Millisecond })
	defer s.Busy()()
	s.Hangs(simtest.Completion("x"), s.Prefill(simtest.Completion("x")))
	simtest.WaitFor(t, "P lets go", func() bool { return s.P.Stats().PinnedBlocks == 0 })
}

// TestStreamedPrefillPinsForNobody: its chunks carry no handoff (docs/protocols/nixl.md, recording 04).
func TestStreamedPrefillPinsForNobody(t *testing.T) {
	s := simtest.New(t)
	a := s.Ask(s.P, simtest.With(simtest.Completion("x"),
		simtest.Obj{"max_tokens": 1, "stream": true, "kv_transfer_params": simtest.Obj{"do_remote_decode": true}}))
	assert.NotContains(t, a.Body, "kv_transfer_params")
	assert.Equal(t, 8, s.P.Stats().PinnedBlocks)
	require.NoError(t, s.P.WaitIdle(t.Context()))
	assert.Equal(t, enginesim.KVLeak, simtest.FirstFault(t, s.P))
}

// TestDecodeWithoutTransferIsTold by D's metrics and its ledger.
func TestDecodeWithoutTransferIsTold(t *testing.T) {
	s := simtest.New(t)
	for _, params := range []any{nil, simtest.Obj{}} {
		body := simtest.Completion("x")
		s.Right(body, s.Ask(s.D, simtest.With(body, simtest.Obj{"kv_transfer_params": params, "cache_salt": "s"})))
	}
	stats := s.D.Stats()
	assert.EqualValues(t, 240+16, stats.LocalCompute)
	assert.Zero(t, stats.ExternalKVTransfer)
	assert.Equal(t, enginesim.KVNoTransfer, simtest.FirstFault(t, s.D))
}

// TestCheckKVJoinsEveryFault so that a test sees all of them.
func TestCheckKVJoinsEveryFault(t *testing.T) {
	s := simtest.New(t)
	body := simtest.Completion("x")
	h := s.Prefill(body)
	for range 3 {
		s.Decode(body, h)
	}
	joined, ok := s.P.CheckKV().(interface{ Unwrap() []error })
	require.True(t, ok)
	assert.Len(t, joined.Unwrap(), 2)
	var f *enginesim.KVFault
	require.ErrorAs(t, s.P.CheckKV(), &f)
	assert.Equal(t, s.P.EngineID(), f.Engine)
	assert.Equal(t, h["remote_request_id"], f.Request)
}
