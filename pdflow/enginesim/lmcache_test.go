// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"context"
	"io"
	"log"
	"maps"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

// lmcacheScene is a pair over one store of chunks of 64 tokens; change gives D other settings, or both.
func lmcacheScene(t *testing.T, change func(p, d *enginesim.Config)) *scene {
	dir := t.TempDir()
	return newScene(t, func(p, d *enginesim.Config) {
		for _, c := range []*enginesim.Config{p, d} {
			c.Connector, c.KVRole = "lmcache", enginesim.RoleBoth
			c.Extra = map[string]string{"store": dir, "hash_seed": "0", "chunk_size": "64"}
		}
		if change != nil {
			change(p, d)
		}
	})
}

// both runs a prompt at P, for one token, and then at D.
func (s *scene) both(body obj) answer {
	s.t.Helper()
	require.Equal(s.t, 200, s.post(s.t.Context(), s.p, completions, with(body, obj{"max_tokens": 1})).status)
	return s.post(s.t.Context(), s.d, completions, body)
}

// Chunks of 64: of 240 tokens three are whole, and the rest is computed.
func TestLMCacheLoadsWholeChunks(t *testing.T) {
	s := lmcacheScene(t, nil)
	body := completion("one")
	got := s.both(body)
	require.Equal(t, 200, got.status)
	assert.Equal(t, s.alone(completions, body), got.text())
	assert.EqualValues(t, 192, s.d.Stats().ExternalKVTransfer)
	assert.EqualValues(t, 48, s.d.Stats().LocalCompute)
	assert.EqualValues(t, 192, got.get("usage.prompt_tokens_details.cached_tokens").Int())
	assert.Zero(t, s.p.Stats().ExternalKVTransfer)
	assert.NoError(t, s.p.CheckKV())
	assert.NoError(t, s.d.CheckKV())
}

// A prompt of whole chunks only: its last token is computed all the same, for the answer starts from it.
func TestLMCacheComputesTheLastToken(t *testing.T) {
	s := lmcacheScene(t, nil)
	body := with(completion("one"), obj{"prompt": prompt(128, "one")})
	assert.Equal(t, s.alone(completions, body), s.both(body).text())
	assert.EqualValues(t, 127, s.d.Stats().ExternalKVTransfer)
}

// What makes LMCache find nothing, in silence: all answers are right.
func TestLMCacheFindsNothing(t *testing.T) {
	for rule, change := range map[string]func(p, d *enginesim.Config){
		"another store":                      func(_, d *enginesim.Config) { d.Extra["store"] += "/other" },
		"another PYTHONHASHSEED":             func(_, d *enginesim.Config) { d.Extra["hash_seed"] = "1" },
		"no PYTHONHASHSEED":                  func(p, d *enginesim.Config) { delete(p.Extra, "hash_seed"); delete(d.Extra, "hash_seed") },
		"chunks of another size":             func(_, d *enginesim.Config) { d.Extra["chunk_size"] = "128" },
		"chunks longer than the prompt":      func(p, d *enginesim.Config) { p.Extra["chunk_size"] = "256"; d.Extra["chunk_size"] = "256" },
		"a put that is not done":             func(p, _ *enginesim.Config) { p.Extra["put_delay"] = "10s" },
		"a prefill engine that only reads":   func(p, _ *enginesim.Config) { p.KVRole = enginesim.RoleConsumer },
		"a decode engine that only produces": func(_, d *enginesim.Config) { d.KVRole = enginesim.RoleProducer },
	} {
		t.Run(rule, func(t *testing.T) {
			s := lmcacheScene(t, change)
			body := completion("one")
			got := s.both(body)
			require.Equal(t, 200, got.status)
			assert.Equal(t, s.alone(completions, body), got.text())
			assert.Zero(t, s.d.Stats().ExternalKVTransfer)
			assert.EqualValues(t, 240, s.d.Stats().LocalCompute)
		})
	}
}

func TestLMCacheSettings(t *testing.T) {
	for rule, extra := range map[string]map[string]string{
		"no store":             {"chunk_size": "64"},
		"a chunk of no blocks": {"store": t.TempDir(), "chunk_size": "48"},
		"a chunk of none":      {"store": t.TempDir(), "chunk_size": "many"},
		"a delay of none":      {"store": t.TempDir(), "put_delay": "soon"},
	} {
		_, err := enginesim.Start(enginesim.Config{Connector: "lmcache", Extra: extra})
		assert.Error(t, err, rule)
	}
	for rule, extra := range map[string]map[string]string{
		"a sender without a proxy":   nil,
		"a skip of none":             {"pd_skip_proxy_notification": "true", "skip_last_n_tokens": "-1"},
		"a receiver's port of none":  {"pd_skip_proxy_notification": "true", "pd_peer_init_port": "x"},
		"a buffer of none":           {"pd_skip_proxy_notification": "true", "pd_buffer_size": "x"},
		"a chunk that is not blocks": {"pd_skip_proxy_notification": "true", "chunk_size": "1"},
	} {
		_, err := enginesim.Start(enginesim.Config{Connector: "lmcache-pd", Extra: extra})
		assert.Error(t, err, rule)
	}
}

// lmcachePair is a sender and a receiver, and a proxy's PULL socket.
type lmcachePair struct {
	*scene
	notices chan string // request ids
}

func newLMCachePair(t *testing.T, extra map[string]string) *lmcachePair {
	ctx, cancel := context.WithCancel(context.Background())
	pull := zmq4.NewPull(ctx, zmq4.WithLogger(log.New(io.Discard, "", 0)))
	require.NoError(t, pull.Listen("tcp://127.0.0.1:0"))
	host, port, err := net.SplitHostPort(pull.Addr().String())
	require.NoError(t, err)
	x := &lmcachePair{notices: make(chan string, 16)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			m, err := pull.Recv()
			if ctx.Err() != nil {
				return
			}
			var n map[string]string
			if err != nil || msgpack.Unmarshal(m.Bytes(), &n) != nil || n["type"] != "ProxyNotif" {
				continue
			}
			x.notices <- n["req_id"]
		}
	}()
	t.Cleanup(func() { cancel(); _ = pull.Close(); <-ended })
	x.scene = newScene(t, func(p, d *enginesim.Config) {
		settings := map[string]string{"pd_proxy_host": host, "pd_proxy_port": port, "hash_seed": "0", "chunk_size": "64"}
		maps.Copy(settings, extra)
		p.Connector, p.Extra = "lmcache-pd", settings
		d.Connector, d.Extra = "lmcache-pd", settings
	})
	return x
}

// spec is D's receiver as a proxy names it.
func (x *lmcachePair) spec() obj {
	host, init, alloc := x.d.Receiver()
	return obj{"req_id": "r-1", "receiver_host": host, "receiver_init_port": []int{init}, "receiver_alloc_port": []int{alloc}}
}

func (x *lmcachePair) prefill(body, params obj) answer {
	x.t.Helper()
	return x.post(x.t.Context(), x.p, completions, with(body, obj{"max_tokens": 1, "kv_transfer_params": params}))
}

func (x *lmcachePair) noNotice() {
	x.t.Helper()
	select {
	case id := <-x.notices:
		x.t.Errorf("a notice of %q", id)
	case <-time.After(150 * time.Millisecond):
	}
}

func TestLMCachePDPushesThenTells(t *testing.T) {
	x := newLMCachePair(t, nil)
	body := completion("one")
	a := x.prefill(body, obj{"disagg_spec": x.spec()})
	require.Equal(t, 200, a.status, a.body)
	assert.Equal(t, "null", a.get("kv_transfer_params").Raw, "no first token unless it is asked for")
	assert.Equal(t, "r-1", <-x.notices)
	got := x.post(t.Context(), x.d, completions, body)
	assert.Equal(t, x.alone(completions, body), got.text())
	assert.EqualValues(t, 239, x.d.Stats().ExternalKVTransfer, "all but the last token, partial chunk included")
	assert.EqualValues(t, 8*block*16, x.p.Stats().BytesTransferred, "the sender writes")
	assert.NoError(t, x.d.CheckKV())

	x.post(t.Context(), x.d, completions, with(body, obj{"cache_salt": "no local hit"}))
	assert.EqualValues(t, 239, x.d.Stats().ExternalKVTransfer, "a chunk that was read is gone")
}

func TestLMCachePDGivesTheFirstToken(t *testing.T) {
	x := newLMCachePair(t, map[string]string{"skip_last_n_tokens": "1"})
	body := with(completion("one"), obj{"return_token_ids": true})
	a := x.prefill(body, obj{"ret_first_tok": true, "disagg_spec": x.spec()})
	<-x.notices
	first := a.get("choices.0.token_ids.0").Int()
	require.Equal(t, first, a.get("kv_transfer_params.first_tok").Int())
	ids := append(a.get("choices.0.prompt_token_ids").Array(), a.get("choices.0.token_ids.0"))
	tokens := make([]int64, len(ids))
	for i, id := range ids {
		tokens[i] = id.Int()
	}
	got := x.post(t.Context(), x.d, completions, obj{"prompt": tokens, "max_tokens": 23, "temperature": 0})
	require.Equal(t, 200, got.status, got.body)
	assert.Equal(t, x.alone(completions, completion("one")), a.text()+got.text())
	assert.EqualValues(t, 240, x.d.Stats().ExternalKVTransfer)
	assert.EqualValues(t, 1, x.d.Stats().LocalCompute, "the first token's own KV")
}

// What a wrong proxy gets from the real engine.
func TestLMCachePDOfAWrongProxy(t *testing.T) {
	changed := func(x *lmcachePair, key string, value any) obj { return with(x.spec(), obj{key: value}) }
	for rule, spec := range map[string]func(x *lmcachePair) obj{
		"no disagg_spec: nothing is pushed":  func(*lmcachePair) obj { return nil },
		"a bare port where a list is wanted": func(x *lmcachePair) obj { return changed(x, "receiver_init_port", 8300) },
		"no ports":                           func(x *lmcachePair) obj { return changed(x, "receiver_alloc_port", []int{}) },
		"ports that are exchanged": func(x *lmcachePair) obj {
			return with(x.spec(), obj{"receiver_init_port": x.spec()["receiver_alloc_port"]})
		},
		"a receiver that is not there": func(x *lmcachePair) obj { return changed(x, "receiver_init_port", []int{1}) },
	} {
		t.Run(rule, func(t *testing.T) {
			x := newLMCachePair(t, nil)
			params := obj{}
			if s := spec(x); s != nil {
				params["disagg_spec"] = s
			}
			require.Equal(t, 200, x.prefill(completion("one"), params).status, "P answers all the same")
			x.noNotice()
			got := x.post(t.Context(), x.d, completions, completion("one"))
			assert.Equal(t, x.alone(completions, completion("one")), got.text())
			assert.Zero(t, x.d.Stats().ExternalKVTransfer)
		})
	}
	t.Run("a member is missing: the engine dies", func(t *testing.T) {
		x := newLMCachePair(t, nil)
		spec := x.spec()
		delete(spec, "receiver_host")
		assert.Equal(t, 500, x.prefill(completion("one"), obj{"disagg_spec": spec}).status)
		x.dies(x.p)
	})
}

// A decode that comes before the data finds the chunks, whose memory holds nothing yet: 200, with another text.
func TestLMCachePDDecodeBeforeTheNoticeAnswersWrongly(t *testing.T) {
	x := newLMCachePair(t, map[string]string{"push_delay": "300ms"})
	body := completion("one")
	require.Equal(t, 200, x.prefill(body, obj{"disagg_spec": x.spec()}).status)
	time.Sleep(100 * time.Millisecond)
	early := x.post(t.Context(), x.d, completions, body)
	require.Equal(t, 200, early.status)
	assert.NotEqual(t, x.alone(completions, body), early.text())
	assert.Equal(t, "r-1", <-x.notices)
}

func TestLMCachePDWithoutNotices(t *testing.T) {
	for rule, extra := range map[string]map[string]string{
		"notices switched off":                     {"pd_skip_proxy_notification": "true"},
		"a prompt shorter than a chunk, discarded": {"discard_partial_chunks": "true", "chunk_size": "256"},
		"no room at the receiver":                  {"pd_buffer_size": strconv.Itoa(7 * block * 16)},
	} {
		t.Run(rule, func(t *testing.T) {
			x := newLMCachePair(t, extra)
			require.Equal(t, 200, x.prefill(completion("one"), obj{"disagg_spec": x.spec()}).status)
			x.noNotice()
		})
	}
}

func TestLMCachePDReceiverKeepsItsPorts(t *testing.T) {
	x := newLMCachePair(t, nil)
	before := x.spec()
	require.NoError(t, x.d.Restart())
	assert.Equal(t, before, x.spec())
	host, init, alloc := x.p.Receiver()
	assert.Empty(t, host, "a sender receives nothing")
	assert.Zero(t, init+alloc)
}
