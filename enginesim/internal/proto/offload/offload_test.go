// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// offloading are engines with settings of D's besides.
func offloading(more ...string) func(p, d *enginesim.Config) {
	return func(p, d *enginesim.Config) {
		simtest.Of("offload-p2p", "PYTHONHASHSEED", "42", "load_timeout", "0.3")(p, d)
		for i := 0; i+1 < len(more); i += 2 {
			d.Extra[more[i]] = more[i+1]
		}
	}
}

// p2pLegs are the two legs of a pair (docs/protocols/offload-p2p.md).
func p2pLegs(s *simtest.Scene, body simtest.Obj, id string) (prefill, decode simtest.Obj) {
	host, port := simtest.Side(s.T, s.P)
	prefill = simtest.Leg(body, simtest.Obj{"remote_decoder": simtest.Obj{"kv_request_id": id}})
	return simtest.With(prefill, simtest.Obj{"max_tokens": 1}), simtest.Leg(body, simtest.Obj{
		"remote_prefiller": simtest.Obj{"kv_request_id": id, "remote_host": host, "remote_port": port}})
}

func TestOffloadLegsInAnyOrder(t *testing.T) {
	for _, name := range simtest.Orders {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, offloading("load_timeout", "20"))
			body := simtest.With(simtest.Completion(name), simtest.Obj{"prompt": simtest.Prompt(250, name)})
			prefill, decode := p2pLegs(s, body, "id-1")
			p, d := s.Both(name, prefill, decode)
			require.Equal(t, 200, p.Status, p.Body)
			require.Equal(t, 200, d.Status, d.Body)
			assert.Equal(t, "null", p.Get("kv_transfer_params").Raw, "P says nothing of the transfer")
			s.Right(body, d)
			stats := s.D.Stats()
			assert.EqualValues(t, 224, stats.ExternalKVTransfer, "whole blocks")
			assert.EqualValues(t, 26, stats.LocalCompute)
			s.Clean()
			assert.Contains(t, s.Get(s.D, "/metrics").Body,
				`vllm:kv_offload_tiering_read_bytes_total{engine="0",model_name="tiny",tier="1:p2p"} 3584.0`)
			assert.Contains(t, s.Get(s.P, "/metrics").Body,
				`vllm:kv_offload_tiering_write_bytes_total{engine="0",model_name="tiny",tier="1:p2p"} 3584.0`)
		})
	}
}

// P offers its blocks however its response ends, unlike Mooncake.
func TestOffloadPrefillThatStops(t *testing.T) {
	s := simtest.New(t, offloading("load_timeout", "20"))
	body := simtest.Completion("x")
	prefill, decode := p2pLegs(s, body, "id-1")
	p := s.Ask(s.P, simtest.With(prefill, simtest.Obj{"stop": s.First(body)}))
	assert.Equal(t, "stop", p.Get("choices.0.finish_reason").String())
	s.Right(body, s.Ask(s.D, decode))
	assert.EqualValues(t, 224, s.D.Stats().ExternalKVTransfer)
}

// Whatever is wrong, D computes the prompt in silence, also under the policy fail: 200, the right text, nothing reused.
func TestOffloadFallsBackToComputing(t *testing.T) {
	for name, change := range map[string]func(s *simtest.Scene, prefill, decode simtest.Obj){
		"no id":   func(_ *simtest.Scene, _, d simtest.Obj) { delete(prefiller(d), "kv_request_id") },
		"no host": func(_ *simtest.Scene, _, d simtest.Obj) { delete(prefiller(d), "remote_host") },
		"no port": func(_ *simtest.Scene, _, d simtest.Obj) { delete(prefiller(d), "remote_port") },
		"names before July 2026, on D": func(_ *simtest.Scene, _, d simtest.Obj) {
			d["kv_transfer_params"] = simtest.Obj{"decode": prefiller(d)}
		},
		"names before July 2026, on P": func(_ *simtest.Scene, p, _ simtest.Obj) {
			p["kv_transfer_params"] = simtest.Obj{"decode": simtest.Obj{"kv_request_id": "id-1"}}
		},
		"P stores under no id": func(_ *simtest.Scene, p, _ simtest.Obj) {
			p["kv_transfer_params"] = simtest.Obj{"remote_decoder": simtest.Obj{}}
		},
		"another id":    func(_ *simtest.Scene, _, d simtest.Obj) { prefiller(d)["kv_request_id"] = "id-2" },
		"a closed port": func(_ *simtest.Scene, _, d simtest.Obj) { prefiller(d)["remote_port"] = 1 },
		"P is gone":     func(s *simtest.Scene, _, _ simtest.Obj) { s.P.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, offloading(), simtest.OwnPorts(t))
			body := simtest.Completion("x")
			prefill, decode := p2pLegs(s, body, "id-1")
			change(s, prefill, decode)
			if !s.P.Dead() {
				require.Equal(t, 200, s.Ask(s.P, prefill).Status)
			}
			a := s.Ask(s.D, decode)
			s.Right(body, a)
			assert.Zero(t, s.D.Stats().ExternalKVTransfer)
			assert.Equal(t, enginesim.KVNoTransfer, simtest.FirstFault(t, s.D))
		})
	}
	t.Run("another hash seed is turned away at once", func(t *testing.T) {
		s := simtest.New(t, offloading("PYTHONHASHSEED", "0", "load_timeout", "20"))
		prefill, decode := p2pLegs(s, simtest.Completion("x"), "id-1")
		require.Equal(t, 200, s.Ask(s.P, prefill).Status)
		begun := time.Now()
		assert.Equal(t, 200, s.Ask(s.D, decode).Status)
		assert.Less(t, time.Since(begun), 10*time.Second)
		assert.EqualValues(t, 240, s.D.Stats().LocalCompute)
		assert.Contains(t, s.Get(s.D, "/metrics").Body,
			`vllm:kv_offload_tiering_promotion_job_failures_total{engine="0",model_name="tiny",tier="1:p2p"} 1.0`)
	})
}

func prefiller(decode simtest.Obj) simtest.Obj {
	return decode["kv_transfer_params"].(simtest.Obj)["remote_prefiller"].(simtest.Obj)
}

// P keeps blocks that nobody asks for only for a while; who asks later computes.
func TestOffloadUnboundBlocks(t *testing.T) {
	s := simtest.New(t, offloading(), func(p, _ *enginesim.Config) {
		p.Extra = map[string]string{"PYTHONHASHSEED": "42", "unbound_store_timeout_s": "2"}
	})
	prefill, decode := p2pLegs(s, simtest.Completion("x"), "id-1")
	require.Equal(t, 200, s.Ask(s.P, prefill).Status)
	assert.NotZero(t, s.P.Stats().PinnedBlocks)
	simtest.WaitFor(t, "P lets go", func() bool { return s.P.Stats().PinnedBlocks == 0 })
	s.Right(simtest.Completion("x"), s.Ask(s.D, decode))
	assert.EqualValues(t, 240, s.D.Stats().LocalCompute)
}

// A client that leaves while D waits ends that, and both engines serve on.
func TestOffloadClientLeaves(t *testing.T) {
	s := simtest.New(t, offloading("load_timeout", "20"))
	_, orphan := p2pLegs(s, simtest.Completion("x"), "id-1")
	ctx, leave := context.WithCancel(t.Context())
	got := s.Later(ctx, s.D, simtest.Completions, orphan)
	simtest.WaitFor(t, "D asks", func() bool { return s.D.Stats().Requests == 1 })
	time.Sleep(time.Second) // P does not show that it was asked
	leave()
	require.ErrorIs(t, (<-got).Err, context.Canceled)
	simtest.WaitFor(t, "P is told", func() bool { return s.P.Stats().Orphans == 1 })
	prefill, decode := p2pLegs(s, simtest.Completion("y"), "id-2")
	require.Equal(t, 200, s.Ask(s.P, prefill).Status)
	s.Right(simtest.Completion("y"), s.Ask(s.D, decode))
	assert.NoError(t, s.P.CheckKV())
}

func TestOffloadSettings(t *testing.T) {
	_, err := enginesim.Start(enginesim.Config{Connector: "offload-p2p",
		Extra: map[string]string{"unbound_store_timeout_s": "x"}})
	require.ErrorContains(t, err, "unbound_store_timeout_s")
}
