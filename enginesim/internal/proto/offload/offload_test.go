// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"context"
	"maps"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func offloading(more map[string]string) func(p, d *enginesim.Config) {
	return func(p, d *enginesim.Config) {
		p.Connector, d.Connector = "offload-p2p", "offload-p2p"
		p.Extra = map[string]string{"PYTHONHASHSEED": "42", "load_timeout": "0.3"}
		d.Extra = maps.Clone(p.Extra)
		maps.Copy(d.Extra, more)
	}
}

// p2pLegs are the two legs of a pair (docs/protocols/offload-p2p.md).
func p2pLegs(s *enginesimtest.Scene, body enginesimtest.Obj, id string) (prefill, decode enginesimtest.Obj) {
	host, port, err := net.SplitHostPort(s.P.SideChannel())
	require.NoError(s.T, err)
	number, err := strconv.Atoi(port)
	require.NoError(s.T, err)
	return enginesimtest.With(body, enginesimtest.Obj{"max_tokens": 1,
			"kv_transfer_params": enginesimtest.Obj{"remote_decoder": enginesimtest.Obj{"kv_request_id": id}}}),
		enginesimtest.With(body,
			enginesimtest.Obj{"kv_transfer_params": enginesimtest.Obj{"remote_prefiller": enginesimtest.Obj{"kv_request_id": id,
				"remote_host": host, "remote_port": number}}})
}

func TestOffloadLegsInAnyOrder(t *testing.T) {
	for _, name := range []string{"P first", "both", "D first"} {
		t.Run(name, func(t *testing.T) {
			s := enginesimtest.New(t, offloading(map[string]string{"load_timeout": "20"}))
			body := enginesimtest.With(enginesimtest.Completion(name), enginesimtest.Obj{"prompt": enginesimtest.Prompt(250, name)})
			prefill, decode := p2pLegs(s, body, "id-1")
			var p, d enginesimtest.Response
			if name == "P first" {
				p = s.Post(t.Context(), s.P, enginesimtest.Completions, prefill)
				d = s.Post(t.Context(), s.D, enginesimtest.Completions, decode)
			} else {
				ch := s.Later(t.Context(), s.D, enginesimtest.Completions, decode)
				if name == "D first" {
					time.Sleep(100 * time.Millisecond)
				}
				p, d = s.Post(t.Context(), s.P, enginesimtest.Completions, prefill), <-ch
			}
			require.Equal(t, 200, p.Status, p.Body)
			require.Equal(t, 200, d.Status, d.Body)
			assert.Equal(t, "null", p.Get("kv_transfer_params").Raw, "P says nothing of the transfer")
			assert.Equal(t, s.Alone(enginesimtest.Completions, body), d.Text())
			stats := s.D.Stats()
			assert.EqualValues(t, 224, stats.ExternalKVTransfer, "whole blocks")
			assert.EqualValues(t, 26, stats.LocalCompute)
			assert.Zero(t, s.P.Stats().PinnedBlocks)
			assert.NoError(t, s.P.CheckKV())
			assert.NoError(t, s.D.CheckKV())
			assert.Contains(t, s.Get(s.D, "/metrics").Body,
				`vllm:kv_offload_tiering_read_bytes_total{engine="0",model_name="tiny",tier="1:p2p"} 3584.0`)
			assert.Contains(t, s.Get(s.P, "/metrics").Body,
				`vllm:kv_offload_tiering_write_bytes_total{engine="0",model_name="tiny",tier="1:p2p"} 3584.0`)
		})
	}
}

// P offers its blocks however its response ends, unlike Mooncake.
func TestOffloadPrefillThatStops(t *testing.T) {
	s := enginesimtest.New(t, offloading(map[string]string{"load_timeout": "20"}))
	body := enginesimtest.Completion("x")
	first := s.Post(t.Context(), s.O, enginesimtest.Completions,
		enginesimtest.With(body, enginesimtest.Obj{"max_tokens": 1,
			"return_token_ids": true})).Get("choices.0.token_ids.0").Int()
	prefill, decode := p2pLegs(s, body, "id-1")
	p := s.Post(t.Context(), s.P, enginesimtest.Completions, enginesimtest.With(prefill,
		enginesimtest.Obj{"stop_token_ids": []int64{first}}))
	assert.Equal(t, "stop", p.Get("choices.0.finish_reason").String())
	assert.Equal(t, s.Alone(enginesimtest.Completions, body), s.Post(t.Context(), s.D, enginesimtest.Completions,
		decode).Text())
	assert.EqualValues(t, 224, s.D.Stats().ExternalKVTransfer)
}

// Whatever is wrong, D computes the prompt in silence, also under the policy fail: 200, the right text, nothing reused.
func TestOffloadFallsBackToComputing(t *testing.T) {
	for name, change := range map[string]func(s *enginesimtest.Scene, prefill, decode enginesimtest.Obj){
		"no id":   func(_ *enginesimtest.Scene, _, d enginesimtest.Obj) { delete(prefiller(d), "kv_request_id") },
		"no host": func(_ *enginesimtest.Scene, _, d enginesimtest.Obj) { delete(prefiller(d), "remote_host") },
		"no port": func(_ *enginesimtest.Scene, _, d enginesimtest.Obj) { delete(prefiller(d), "remote_port") },
		"names before July 2026, on D": func(_ *enginesimtest.Scene, _, d enginesimtest.Obj) {
			d["kv_transfer_params"] = enginesimtest.Obj{"decode": prefiller(d)}
		},
		"names before July 2026, on P": func(_ *enginesimtest.Scene, p, _ enginesimtest.Obj) {
			p["kv_transfer_params"] = enginesimtest.Obj{"decode": enginesimtest.Obj{"kv_request_id": "id-1"}}
		},
		"P stores under no id": func(_ *enginesimtest.Scene, p, _ enginesimtest.Obj) {
			p["kv_transfer_params"] = enginesimtest.Obj{"remote_decoder": enginesimtest.Obj{}}
		},
		"another id":    func(_ *enginesimtest.Scene, _, d enginesimtest.Obj) { prefiller(d)["kv_request_id"] = "id-2" },
		"a closed port": func(_ *enginesimtest.Scene, _, d enginesimtest.Obj) { prefiller(d)["remote_port"] = 1 },
		"P is gone":     func(s *enginesimtest.Scene, _, _ enginesimtest.Obj) { s.P.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			s := enginesimtest.New(t, offloading(nil), enginesimtest.OwnPorts(t))
			body := enginesimtest.Completion("x")
			prefill, decode := p2pLegs(s, body, "id-1")
			change(s, prefill, decode)
			if !s.P.Dead() {
				require.Equal(t, 200, s.Post(t.Context(), s.P, enginesimtest.Completions, prefill).Status)
			}
			a := s.Post(t.Context(), s.D, enginesimtest.Completions, decode)
			require.Equal(t, 200, a.Status, a.Body)
			assert.Equal(t, s.Alone(enginesimtest.Completions, body), a.Text())
			assert.Zero(t, s.D.Stats().ExternalKVTransfer)
			assert.Equal(t, enginesim.KVNoTransfer, enginesimtest.FirstFault(t, s.D))
		})
	}
	t.Run("another hash seed is turned away at once", func(t *testing.T) {
		s := enginesimtest.New(t, offloading(map[string]string{"PYTHONHASHSEED": "0", "load_timeout": "20"}))
		prefill, decode := p2pLegs(s, enginesimtest.Completion("x"), "id-1")
		require.Equal(t, 200, s.Post(t.Context(), s.P, enginesimtest.Completions, prefill).Status)
		begun := time.Now()
		assert.Equal(t, 200, s.Post(t.Context(), s.D, enginesimtest.Completions, decode).Status)
		assert.Less(t, time.Since(begun), 10*time.Second)
		assert.EqualValues(t, 240, s.D.Stats().LocalCompute)
		assert.Contains(t, s.Get(s.D, "/metrics").Body,
			`vllm:kv_offload_tiering_promotion_job_failures_total{engine="0",model_name="tiny",tier="1:p2p"} 1.0`)
	})
}

func prefiller(decode enginesimtest.Obj) enginesimtest.Obj {
	return decode["kv_transfer_params"].(enginesimtest.Obj)["remote_prefiller"].(enginesimtest.Obj)
}

// P keeps blocks that nobody asks for only for a while; who asks later computes.
func TestOffloadUnboundBlocks(t *testing.T) {
	s := enginesimtest.New(t, offloading(nil), func(p, _ *enginesim.Config) {
		p.Extra = map[string]string{"PYTHONHASHSEED": "42", "unbound_store_timeout_s": "2"}
	})
	prefill, decode := p2pLegs(s, enginesimtest.Completion("x"), "id-1")
	require.Equal(t, 200, s.Post(t.Context(), s.P, enginesimtest.Completions, prefill).Status)
	assert.NotZero(t, s.P.Stats().PinnedBlocks)
	enginesimtest.WaitFor(t, "P lets go", func() bool { return s.P.Stats().PinnedBlocks == 0 })
	assert.Equal(t, s.Alone(enginesimtest.Completions, enginesimtest.Completion("x")),
		s.Post(t.Context(), s.D, enginesimtest.Completions, decode).Text())
	assert.EqualValues(t, 240, s.D.Stats().LocalCompute)
}

// A client that leaves while D waits ends that, and both engines serve on.
func TestOffloadClientLeaves(t *testing.T) {
	s := enginesimtest.New(t, offloading(map[string]string{"load_timeout": "20"}))
	_, orphan := p2pLegs(s, enginesimtest.Completion("x"), "id-1")
	ctx, leave := context.WithCancel(t.Context())
	got := s.Later(ctx, s.D, enginesimtest.Completions, orphan)
	enginesimtest.WaitFor(t, "D asks", func() bool { return s.D.Stats().Requests == 1 })
	time.Sleep(time.Second) // P does not show that it was asked
	leave()
	require.ErrorIs(t, (<-got).Err, context.Canceled)
	enginesimtest.WaitFor(t, "P is told", func() bool { return s.P.Stats().Orphans == 1 })
	prefill, decode := p2pLegs(s, enginesimtest.Completion("y"), "id-2")
	require.Equal(t, 200, s.Post(t.Context(), s.P, enginesimtest.Completions, prefill).Status)
	assert.Equal(t, s.Alone(enginesimtest.Completions, enginesimtest.Completion("y")),
		s.Post(t.Context(), s.D, enginesimtest.Completions, decode).Text())
	assert.NoError(t, s.P.CheckKV())
}

func TestOffloadSettings(t *testing.T) {
	_, err := enginesim.Start(enginesim.Config{Connector: "offload-p2p",
		Extra: map[string]string{"unbound_store_timeout_s": "x"}})
	require.ErrorContains(t, err, "unbound_store_timeout_s")
}
