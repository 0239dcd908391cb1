// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func mooncakes(p, d *enginesim.Config) { p.Connector, d.Connector = "mooncake", "mooncake" }

// mooncakesWith are engines with settings of the connector's, both the same.
func mooncakesWith(extra ...string) func(p, d *enginesim.Config) {
	return func(p, d *enginesim.Config) {
		mooncakes(p, d)
		p.Extra = map[string]string{}
		for i := 0; i+1 < len(extra); i += 2 {
			p.Extra[extra[i]] = extra[i+1]
		}
		d.Extra = p.Extra
	}
}

const patience = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"

func (c *client) fetch(url string) answer {
	c.t.Helper()
	r, err := http.NewRequestWithContext(c.t.Context(), http.MethodGet, url, nil)
	require.NoError(c.t, err)
	return c.do(r)
}

// query asks a bootstrap server.
func (c *client) query(e *enginesim.Engine) answer {
	c.t.Helper()
	return c.fetch(e.Bootstrap() + "/query")
}

func (s *scene) engineOf(rank string) string {
	s.t.Helper()
	a := s.query(s.p)
	require.NoError(s.t, a.err)
	require.Equal(s.t, 200, a.status)
	return gjson.Get(a.body, rank+".engine_id").String()
}

// mooncakeLegs are the two legs of a pair, as recorded (capture mooncake/01).
func (s *scene) mooncakeLegs(body obj, id string) (prefill, decode obj) {
	prefill = with(body, obj{"max_tokens": 1, "stream": false, "kv_transfer_params": obj{"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id}})
	decode = with(body, obj{"kv_transfer_params": obj{"do_remote_decode": false, "do_remote_prefill": true, "remote_bootstrap_addr": s.p.Bootstrap(), "remote_engine_id": s.engineOf("0"), "transfer_id": id}})
	return prefill, decode
}

// later sends a request and gives its answer when it comes.
func (s *scene) later(ctx context.Context, e *enginesim.Engine, path string, body obj, headers ...string) <-chan answer {
	ch := make(chan answer, 1)
	go func() { ch <- s.post(ctx, e, path, body, headers...) }()
	return ch
}

// waits sends a decode that D must not answer, and gives what makes its client leave.
func (s *scene) waits(decode obj) (leave func()) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(s.t.Context())
	waiting := s.d.Stats().Waiting
	got := s.later(ctx, s.d, completions, decode)
	waitFor(s.t, "D waits", func() bool { return s.d.Stats().Waiting == waiting+1 })
	time.Sleep(50 * time.Millisecond)
	assert.Empty(s.t, got, "it was answered")
	return func() {
		cancel()
		require.ErrorIs(s.t, (<-got).err, context.Canceled)
	}
}

func (s *scene) mooncakeRight(body obj, p, d answer) {
	s.t.Helper()
	require.NoError(s.t, p.err)
	require.NoError(s.t, d.err)
	require.Equal(s.t, 200, p.status, p.body)
	require.Equal(s.t, 200, d.status, d.body)
	assert.Equal(s.t, gjson.Null, p.get("kv_transfer_params").Type, "P says nothing of the transfer")
	assert.Equal(s.t, s.alone(completions, body), d.text())
	assert.EqualValues(s.t, 240, d.get("usage.prompt_tokens_details.cached_tokens").Int(), "unlike NIXL")
}

// mooncakePair runs a pair whose legs go out at once.
func (s *scene) mooncakePair(body obj, id string) {
	s.t.Helper()
	prefill, decode := s.mooncakeLegs(body, id)
	d := s.later(s.t.Context(), s.d, completions, decode)
	s.mooncakeRight(body, s.post(s.t.Context(), s.p, completions, prefill), <-d)
}

// Either leg may come first, also long before the other (captures mooncake/01, 03, 04).
func TestMooncakeLegsInAnyOrder(t *testing.T) {
	for name, wait := range map[string]func(s *scene){
		"D first":    func(s *scene) { waitFor(t, "D waits", func() bool { return s.d.Stats().Waiting == 1 }) },
		"both":       func(*scene) {},
		"P finished": nil,
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, mooncakes)
			body := completion(name)
			prefill, decode := s.mooncakeLegs(body, "xfer-1")
			var p, d answer
			if wait == nil {
				p = s.post(t.Context(), s.p, completions, prefill)
				d = s.post(t.Context(), s.d, completions, decode)
			} else {
				ch := s.later(t.Context(), s.d, completions, decode)
				wait(s)
				p, d = s.post(t.Context(), s.p, completions, prefill), <-ch
			}
			s.mooncakeRight(body, p, d)
			stats := s.d.Stats()
			assert.EqualValues(t, 240, stats.ExternalKVTransfer)
			assert.Zero(t, stats.LocalCompute)
			waitFor(t, "P is the writer, and counts", func() bool { return s.p.Stats().BytesTransferred == (240+block-1)/block*block*16 })
			assert.Zero(t, stats.BytesTransferred)
			assert.Zero(t, s.p.Stats().PinnedBlocks)
			assert.NoError(t, s.p.CheckKV())
			assert.NoError(t, s.d.CheckKV())
			metrics := s.get(s.d, "/metrics").body
			assert.Contains(t, metrics, `source="external_kv_transfer"} 240.0`)
			assert.NotContains(t, metrics, "nixl", "no metric of its own (README of the captures)")
		})
	}
}

func TestMooncakeStreams(t *testing.T) {
	s := newScene(t, mooncakes)
	body := completion("stream")
	prefill, decode := s.mooncakeLegs(body, "xfer-1")
	d := s.later(t.Context(), s.d, completions, with(decode, obj{"stream": true}))
	require.Equal(t, 200, s.post(t.Context(), s.p, completions, with(prefill, obj{"stream": true})).status, "a streamed prefill works too (06)")
	var text strings.Builder
	for _, e := range (<-d).events() {
		text.WriteString(gjson.Get(e, "choices.0.text").String())
	}
	assert.Equal(t, s.alone(completions, body), text.String())
}

// The bootstrap server's address stays, the engine's id is new at each start (capture mooncake/00).
func TestMooncakeBootstrapServer(t *testing.T) {
	s := newScene(t, mooncakes)
	a := s.query(s.p)
	assert.Equal(t, "application/json", a.header.Get("Content-Type"))
	assert.Equal(t, `{"0":{"engine_id":"`+s.p.EngineID()+`","worker_addr":{"0":{"0":"tcp://`+s.p.SideChannel()+`"}}}}`, a.body)
	assert.Empty(t, s.d.Bootstrap(), "a kv_consumer has none")
	assert.Equal(t, 404, s.fetch(s.p.Bootstrap()+"/else").status)
	address, id := s.p.Bootstrap(), s.p.EngineID()
	s.http.CloseIdleConnections() // a POST is not sent again
	require.NoError(t, s.p.Restart())
	assert.Equal(t, address, s.p.Bootstrap())
	assert.NotEqual(t, id, s.engineOf("0"))
	s.mooncakePair(completion("after"), "xfer-1")
}

// An engine id that the bootstrap server does not know fails at once (capture mooncake/09).
func TestMooncakeUnknownEngine(t *testing.T) {
	s := newScene(t, mooncakes)
	_, decode := s.mooncakeLegs(completion("x"), "xfer-1")
	decode["kv_transfer_params"].(obj)["remote_engine_id"] = "nobody"
	a := s.post(t.Context(), s.d, completions, decode)
	assert.Equal(t, 500, a.status)
	assert.Equal(t, internalError, a.get("error.message").String())
	s.alive(s.d)
	s.mooncakePair(completion("y"), "xfer-2")

	s = newScene(t, mooncakes, func(_, d *enginesim.Config) { d.LoadFailure = enginesim.LoadFailureRecompute })
	a = s.post(t.Context(), s.d, completions, decode)
	assert.Equal(t, 200, a.status, "with recompute D does it itself: %s", a.body)
	assert.Equal(t, s.alone(completions, completion("x")), a.text())
	assert.EqualValues(t, 240, s.d.Stats().LocalCompute)
}

// D waits in silence where nobody listens, and where P is gone that it knew (captures mooncake/10, 16).
func TestMooncakeWaitsForEnginesThatAreGone(t *testing.T) {
	t.Run("bootstrap address closed", func(t *testing.T) {
		s := newScene(t, mooncakes)
		_, decode := s.mooncakeLegs(completion("x"), "xfer-1")
		decode["kv_transfer_params"].(obj)["remote_bootstrap_addr"] = "http://127.0.0.1:1"
		s.waits(decode)()
		s.alive(s.d)
	})
	t.Run("P killed", func(t *testing.T) {
		s := newScene(t, mooncakes)
		_, decode := s.mooncakeLegs(completion("x"), "xfer-1")
		leave := s.waits(decode)
		s.p.Kill()
		time.Sleep(50 * time.Millisecond)
		assert.Equal(t, 1, s.d.Stats().Waiting)
		leave()
		s.alive(s.d)
	})
	t.Run("the id of an engine that restarted", func(t *testing.T) {
		s := newScene(t, mooncakes)
		s.mooncakePair(completion("x"), "xfer-1")
		prefill, decode := s.mooncakeLegs(completion("y"), "xfer-2")
		s.http.CloseIdleConnections() // a POST is not sent again
		require.NoError(t, s.p.Restart())
		require.Equal(t, 200, s.post(t.Context(), s.p, completions, prefill).status)
		s.waits(decode)()
		s.alive(s.d)
	})
}

// A decode without what names P waits, and its abort kills D, if it has the id that makes D tell P (capture mooncake/15).
func TestMooncakeIncompleteParams(t *testing.T) {
	for key, kills := range map[string]bool{"remote_engine_id": true, "remote_bootstrap_addr": true, "transfer_id": false} {
		t.Run(key, func(t *testing.T) {
			s := newScene(t, mooncakes)
			_, decode := s.mooncakeLegs(completion("x"), "xfer-1")
			delete(decode["kv_transfer_params"].(obj), key)
			s.waits(decode)()
			if kills {
				s.dies(s.d)
			} else {
				s.alive(s.d)
			}
		})
	}
	t.Run("unknown keys are ignored (13)", func(t *testing.T) {
		s := newScene(t, mooncakes)
		body := completion("x")
		prefill, decode := s.mooncakeLegs(body, "xfer-1")
		prefill["kv_transfer_params"].(obj)["x"], decode["kv_transfer_params"].(obj)["x"] = 1, obj{"y": 2}
		p := s.post(t.Context(), s.p, completions, prefill)
		s.mooncakeRight(body, p, s.post(t.Context(), s.d, completions, decode))
	})
	t.Run("none at all: D computes (12)", func(t *testing.T) {
		s := newScene(t, mooncakes)
		assert.Equal(t, s.alone(completions, completion("x")), s.post(t.Context(), s.d, completions, completion("x")).text())
		assert.EqualValues(t, 240, s.d.Stats().LocalCompute)
		assert.Equal(t, enginesim.KVNoTransfer, firstFault(t, s.d))
	})
}

// The roles are asserted: the other leg kills the engine core (mooncake_connector.py).
func TestMooncakeRoles(t *testing.T) {
	s := newScene(t, mooncakes)
	prefill, decode := s.mooncakeLegs(completion("x"), "xfer-1")
	assert.Equal(t, 500, s.post(t.Context(), s.d, completions, prefill).status)
	s.dies(s.d)
	assert.Equal(t, 500, s.post(t.Context(), s.p, completions, decode).status)
	s.dies(s.p)
}

// P offers only what ended by length; D waits until P's time is over, fails then, and the next pair works (captures mooncake/08, 19).
func TestMooncakePrefillThatOffersNothing(t *testing.T) {
	for _, name := range []string{"ends by a stop token", "is rejected", "has no transfer id"} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, mooncakesWith(patience, "1"))
			body := completion("x")
			first := s.post(t.Context(), s.o, completions, with(body, obj{"max_tokens": 1, "return_token_ids": true}))
			more := map[string]obj{
				"ends by a stop token": {"stop_token_ids": []int64{first.get("choices.0.token_ids.0").Int()}},
				"is rejected":          {"min_tokens": 5},
				"has no transfer id":   {"kv_transfer_params": obj{"do_remote_decode": true}},
			}[name]
			prefill, decode := s.mooncakeLegs(body, "xfer-1")
			d := s.later(t.Context(), s.d, completions, decode)
			waitFor(t, "D waits", func() bool { return s.d.Stats().Waiting == 1 })
			p := s.post(t.Context(), s.p, completions, with(prefill, more))
			if name == "is rejected" {
				assert.Equal(t, 400, p.status)
			} else {
				assert.Equal(t, 200, p.status, p.body)
			}
			assert.Empty(t, d)
			a := <-d
			assert.Equal(t, 500, a.status, a.body)
			assert.Zero(t, s.p.Stats().PinnedBlocks)
			s.mooncakePair(completion("y"), "xfer-2")
		})
	}
}

// One orphan stops a P with two sender's workers until its time is over, and not one with ten (captures mooncake/17, 18).
func TestMooncakeOrphans(t *testing.T) {
	t.Run("2 workers", func(t *testing.T) {
		s := newScene(t, mooncakesWith("num_workers", "2", patience, "2.5"))
		_, orphan := s.mooncakeLegs(completion("x"), "xfer-1")
		s.waits(orphan)()
		waitFor(t, "P counts it", func() bool { return s.p.Stats().Orphans == 1 })
		body := completion("y")
		prefill, decode := s.mooncakeLegs(body, "xfer-2")
		begun := time.Now()
		d := s.later(t.Context(), s.d, completions, decode)
		p := s.post(t.Context(), s.p, completions, prefill)
		assert.Equal(t, 200, p.status)
		time.Sleep(300 * time.Millisecond)
		assert.Empty(t, d, "P's senders wait for the orphan's prompt")
		s.alive(s.d)
		assert.Equal(t, 200, s.get(s.p, "/health").status)
		s.mooncakeRight(body, p, <-d)
		assert.Greater(t, time.Since(begun), 500*time.Millisecond, "until their time is over")
		assert.NoError(t, s.p.CheckKV())
	})
	t.Run("10 workers", func(t *testing.T) {
		s := newScene(t, mooncakes)
		_, orphan := s.mooncakeLegs(completion("x"), "xfer-1")
		s.waits(orphan)()
		waitFor(t, "P counts it", func() bool { return s.p.Stats().Orphans == 1 })
		s.mooncakePair(completion("y"), "xfer-2")
	})
}

// A prompt that comes after D's client has left is let go, not kept.
func TestMooncakePrefillAfterTheOrphan(t *testing.T) {
	s := newScene(t, mooncakes)
	prefill, decode := s.mooncakeLegs(completion("x"), "xfer-1")
	s.waits(decode)()
	waitFor(t, "P knows", func() bool { return s.p.Stats().Orphans == 1 })
	require.Equal(t, 200, s.post(t.Context(), s.p, completions, prefill).status)
	waitFor(t, "P lets go", func() bool { return s.p.Stats().PinnedBlocks == 0 })
	assert.NoError(t, s.p.CheckKV())
}

// A decode that D's API refuses lets P go, and a transfer id may be used again (capture mooncake/11).
func TestMooncakeRefusedDecodeAndReusedID(t *testing.T) {
	s := newScene(t, mooncakes)
	prefill, decode := s.mooncakeLegs(completion("x"), "xfer-1")
	require.Equal(t, 200, s.post(t.Context(), s.p, completions, prefill).status)
	assert.NotZero(t, s.p.Stats().PinnedBlocks)
	assert.Equal(t, 404, s.post(t.Context(), s.d, completions, with(decode, obj{"model": "other"})).status)
	waitFor(t, "P lets go", func() bool { return s.p.Stats().PinnedBlocks == 0 })
	s.mooncakePair(completion("y"), "xfer-1")
	s.mooncakePair(completion("z"), "xfer-1")
}

// With several data-parallel ranks D must ask the one whose engine id it has, and P must have been told which (mooncake_connector.py).
func TestMooncakeRanks(t *testing.T) {
	s := newScene(t, mooncakesWith("data_parallel_size", "3"))
	body := completion("x")
	prefill, decode := s.mooncakeLegs(body, "xfer-1")
	decode["kv_transfer_params"].(obj)["remote_engine_id"] = s.engineOf("2")
	require.Equal(t, 200, s.post(t.Context(), s.p, completions, prefill, "X-data-parallel-rank", "1").status)
	leave := s.waits(decode)
	leave()
	prefill, decode = s.mooncakeLegs(body, "xfer-2")
	decode["kv_transfer_params"].(obj)["remote_engine_id"] = s.engineOf("2")
	p := s.post(t.Context(), s.p, completions, prefill, "X-data-parallel-rank", "2")
	s.mooncakeRight(body, p, s.post(t.Context(), s.d, completions, decode))
}

func TestMooncakeSettings(t *testing.T) {
	for _, name := range []string{"num_workers", patience, "VLLM_MOONCAKE_BOOTSTRAP_PORT", "data_parallel_size"} {
		_, err := enginesim.Start(enginesim.Config{Connector: "mooncake", Extra: map[string]string{name: "-1"}})
		require.ErrorContains(t, err, name)
	}
	lone, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	assert.Empty(t, lone.Bootstrap())
	require.NoError(t, lone.Close())
}
