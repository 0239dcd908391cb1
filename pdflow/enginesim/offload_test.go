// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"context"
	"maps"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func offloading(more map[string]string) func(p, d *enginesim.Config) {
	return func(p, d *enginesim.Config) {
		p.Connector, d.Connector = "offload-p2p", "offload-p2p"
		p.Extra = map[string]string{"PYTHONHASHSEED": "42", "load_timeout": "0.3"}
		d.Extra = maps.Clone(p.Extra)
		maps.Copy(d.Extra, more)
	}
}

// p2pLegs are the two legs of a pair (protocols/vllm.md §9).
func (s *scene) p2pLegs(body obj, id string) (prefill, decode obj) {
	host, port, err := net.SplitHostPort(s.p.SideChannel())
	require.NoError(s.t, err)
	number, err := strconv.Atoi(port)
	require.NoError(s.t, err)
	return with(body, obj{"max_tokens": 1, "kv_transfer_params": obj{"remote_decoder": obj{"kv_request_id": id}}}),
		with(body, obj{"kv_transfer_params": obj{"remote_prefiller": obj{"kv_request_id": id, "remote_host": host, "remote_port": number}}})
}

func TestOffloadLegsInAnyOrder(t *testing.T) {
	for _, name := range []string{"P first", "both", "D first"} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, offloading(map[string]string{"load_timeout": "20"}))
			body := with(completion(name), obj{"prompt": prompt(250, name)})
			prefill, decode := s.p2pLegs(body, "id-1")
			var p, d answer
			if name == "P first" {
				p = s.post(t.Context(), s.p, completions, prefill)
				d = s.post(t.Context(), s.d, completions, decode)
			} else {
				ch := s.later(t.Context(), s.d, completions, decode)
				if name == "D first" {
					time.Sleep(100 * time.Millisecond)
				}
				p, d = s.post(t.Context(), s.p, completions, prefill), <-ch
			}
			require.Equal(t, 200, p.status, p.body)
			require.Equal(t, 200, d.status, d.body)
			assert.Equal(t, "null", p.get("kv_transfer_params").Raw, "P says nothing of the transfer")
			assert.Equal(t, s.alone(completions, body), d.text())
			stats := s.d.Stats()
			assert.EqualValues(t, 224, stats.ExternalKVTransfer, "whole blocks")
			assert.EqualValues(t, 26, stats.LocalCompute)
			assert.Zero(t, s.p.Stats().PinnedBlocks)
			assert.NoError(t, s.p.CheckKV())
			assert.NoError(t, s.d.CheckKV())
			assert.Contains(t, s.get(s.d, "/metrics").body, `vllm:kv_offload_tiering_read_bytes_total{engine="0",model_name="tiny",tier="1:p2p"} 3584.0`)
			assert.Contains(t, s.get(s.p, "/metrics").body, `vllm:kv_offload_tiering_write_bytes_total{engine="0",model_name="tiny",tier="1:p2p"} 3584.0`)
		})
	}
}

// P offers its blocks however its answer ends, unlike Mooncake.
func TestOffloadPrefillThatStops(t *testing.T) {
	s := newScene(t, offloading(nil))
	body := completion("x")
	first := s.post(t.Context(), s.o, completions, with(body, obj{"max_tokens": 1, "return_token_ids": true})).get("choices.0.token_ids.0").Int()
	prefill, decode := s.p2pLegs(body, "id-1")
	p := s.post(t.Context(), s.p, completions, with(prefill, obj{"stop_token_ids": []int64{first}}))
	assert.Equal(t, "stop", p.get("choices.0.finish_reason").String())
	assert.Equal(t, s.alone(completions, body), s.post(t.Context(), s.d, completions, decode).text())
	assert.EqualValues(t, 224, s.d.Stats().ExternalKVTransfer)
}

// Whatever is wrong, D computes the prompt in silence, also under the policy fail: 200, the right text, nothing reused.
func TestOffloadFallsBackToComputing(t *testing.T) {
	for name, change := range map[string]func(s *scene, prefill, decode obj){
		"no id":                        func(_ *scene, _, d obj) { delete(prefiller(d), "kv_request_id") },
		"no host":                      func(_ *scene, _, d obj) { delete(prefiller(d), "remote_host") },
		"no port":                      func(_ *scene, _, d obj) { delete(prefiller(d), "remote_port") },
		"names before July 2026, on D": func(_ *scene, _, d obj) { d["kv_transfer_params"] = obj{"decode": prefiller(d)} },
		"names before July 2026, on P": func(_ *scene, p, _ obj) { p["kv_transfer_params"] = obj{"decode": obj{"kv_request_id": "id-1"}} },
		"P stores under no id":         func(_ *scene, p, _ obj) { p["kv_transfer_params"] = obj{"remote_decoder": obj{}} },
		"another id":                   func(_ *scene, _, d obj) { prefiller(d)["kv_request_id"] = "id-2" },
		"a closed port":                func(_ *scene, _, d obj) { prefiller(d)["remote_port"] = 1 },
		"P is gone":                    func(s *scene, _, _ obj) { s.p.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, offloading(nil))
			body := completion("x")
			prefill, decode := s.p2pLegs(body, "id-1")
			change(s, prefill, decode)
			if !s.p.Dead() {
				require.Equal(t, 200, s.post(t.Context(), s.p, completions, prefill).status)
			}
			a := s.post(t.Context(), s.d, completions, decode)
			require.Equal(t, 200, a.status, a.body)
			assert.Equal(t, s.alone(completions, body), a.text())
			assert.Zero(t, s.d.Stats().ExternalKVTransfer)
			assert.Equal(t, enginesim.KVNoTransfer, firstFault(t, s.d))
		})
	}
	t.Run("another hash seed is turned away at once", func(t *testing.T) {
		s := newScene(t, offloading(map[string]string{"PYTHONHASHSEED": "0", "load_timeout": "20"}))
		prefill, decode := s.p2pLegs(completion("x"), "id-1")
		require.Equal(t, 200, s.post(t.Context(), s.p, completions, prefill).status)
		begun := time.Now()
		assert.Equal(t, 200, s.post(t.Context(), s.d, completions, decode).status)
		assert.Less(t, time.Since(begun), 10*time.Second)
		assert.EqualValues(t, 240, s.d.Stats().LocalCompute)
		assert.Contains(t, s.get(s.d, "/metrics").body, `vllm:kv_offload_tiering_promotion_job_failures_total{engine="0",model_name="tiny",tier="1:p2p"} 1.0`)
	})
}

func prefiller(decode obj) obj { return decode["kv_transfer_params"].(obj)["remote_prefiller"].(obj) }

// P keeps blocks that nobody asks for only for a while; who asks later computes.
func TestOffloadUnboundBlocks(t *testing.T) {
	s := newScene(t, offloading(nil), func(p, _ *enginesim.Config) {
		p.Extra = map[string]string{"PYTHONHASHSEED": "42", "unbound_store_timeout_s": "0.2"}
	})
	prefill, decode := s.p2pLegs(completion("x"), "id-1")
	require.Equal(t, 200, s.post(t.Context(), s.p, completions, prefill).status)
	assert.NotZero(t, s.p.Stats().PinnedBlocks)
	waitFor(t, "P lets go", func() bool { return s.p.Stats().PinnedBlocks == 0 })
	assert.Equal(t, s.alone(completions, completion("x")), s.post(t.Context(), s.d, completions, decode).text())
	assert.EqualValues(t, 240, s.d.Stats().LocalCompute)
}

// A client that leaves while D waits ends that, and both engines serve on.
func TestOffloadClientLeaves(t *testing.T) {
	s := newScene(t, offloading(map[string]string{"load_timeout": "20"}))
	_, orphan := s.p2pLegs(completion("x"), "id-1")
	ctx, leave := context.WithCancel(t.Context())
	got := s.later(ctx, s.d, completions, orphan)
	waitFor(t, "D asks", func() bool { return s.d.Stats().Requests == 1 })
	time.Sleep(50 * time.Millisecond)
	leave()
	require.ErrorIs(t, (<-got).err, context.Canceled)
	waitFor(t, "P is told", func() bool { return s.p.Stats().Orphans == 1 })
	prefill, decode := s.p2pLegs(completion("y"), "id-2")
	require.Equal(t, 200, s.post(t.Context(), s.p, completions, prefill).status)
	assert.Equal(t, s.alone(completions, completion("y")), s.post(t.Context(), s.d, completions, decode).text())
	assert.NoError(t, s.p.CheckKV())
}

func TestOffloadSettings(t *testing.T) {
	_, err := enginesim.Start(enginesim.Config{Connector: "offload-p2p", Extra: map[string]string{"unbound_store_timeout_s": "x"}})
	require.ErrorContains(t, err, "unbound_store_timeout_s")
}
