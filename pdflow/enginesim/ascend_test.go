// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func ascending(p, d *enginesim.Config) {
	p.Connector, d.Connector = "mooncake-ascend", "mooncake-ascend"
}

// TestAscendPull is the way of vllm-ascend's MooncakeConnectorV1: P's handoff of 14
// keys, relayed as it is.
func TestAscendPull(t *testing.T) {
	s := newScene(t, ascending)
	body := completion("x")
	h := s.prefill(completions, body)
	assert.Len(t, h, 14)
	assert.EqualValues(t, (240+block-1)/block, h["num_prompt_blocks"])
	a := s.decode(completions, body, h)
	require.Equal(t, 200, a.status, a.body)
	assert.Equal(t, s.alone(completions, body), a.text())
	assert.EqualValues(t, 240, s.d.Stats().ExternalKVTransfer)
	assert.Zero(t, s.p.Stats().PinnedBlocks)
	assert.NoError(t, s.p.CheckKV())
	assert.NoError(t, s.d.CheckKV())
}

// TestAscendPrefillThatEndsByStopGivesNothing: request_finished wants length.
func TestAscendPrefillThatEndsByStopGivesNothing(t *testing.T) {
	s := newScene(t, ascending)
	body := completion("x")
	first := s.post(t.Context(), s.o, completions, with(body, obj{"max_tokens": 1})).text()
	a := s.post(t.Context(), s.p, completions, with(body, obj{"max_tokens": 1, "stop": first, "kv_transfer_params": obj{"do_remote_decode": true}}))
	require.Equal(t, 200, a.status)
	assert.Equal(t, "stop", a.get("choices.0.finish_reason").String())
	assert.Equal(t, gjson.Null, a.get("kv_transfer_params").Type)
	assert.Zero(t, s.p.Stats().PinnedBlocks)
}

func TestAscendHandoffsThatHarm(t *testing.T) {
	for name, change := range map[string]func(obj){
		"no block ids":              without("remote_block_ids"),
		"an empty list":             set("remote_block_ids", []any{}),
		"a flat list":               set("remote_block_ids", []int{1, 2}),
		"no num_prompt_blocks":      without("num_prompt_blocks"),
		"too few num_prompt_blocks": set("num_prompt_blocks", 1),
	} {
		t.Run(name+" kills", func(t *testing.T) {
			s := newScene(t, ascending)
			h := s.prefill(completions, completion("x"))
			change(h)
			assert.Equal(t, 500, s.decode(completions, completion("x"), h).status)
			s.dies(s.d)
		})
	}
	for _, key := range []string{"remote_engine_id", "remote_host", "remote_port", "remote_request_id"} {
		t.Run("without "+key+" it hangs", func(t *testing.T) {
			s := newScene(t, ascending)
			h := s.prefill(completions, completion("x"))
			delete(h, key)
			s.hangs(completion("x"), h)
		})
	}
	t.Run("without do_remote_prefill D computes itself", func(t *testing.T) {
		s := newScene(t, ascending)
		h := s.prefill(completions, completion("x"))
		delete(h, "do_remote_prefill")
		a := s.decode(completions, completion("x"), h)
		assert.Equal(t, s.alone(completions, completion("x")), a.text())
		assert.Equal(t, enginesim.KVNoTransfer, firstFault(t, s.d))
		assert.Positive(t, s.p.Stats().PinnedBlocks)
	})
	t.Run("another engine answers there: 500", func(t *testing.T) {
		s := newScene(t, ascending)
		h := s.prefill(completions, completion("x"))
		h["remote_engine_id"] = "other"
		assert.Equal(t, 500, s.decode(completions, completion("x"), h).status)
	})
	t.Run("a decode that the API refuses lets P go", func(t *testing.T) {
		s := newScene(t, ascending)
		h := s.prefill(completions, completion("x"))
		assert.Equal(t, 400, s.decode(completions, with(completion("x"), obj{"max_tokens": 100000}), h).status)
		waitFor(t, "P is free", func() bool { return s.p.Stats().PinnedBlocks == 0 })
	})
	t.Run("blocks wait for the time that the environment gives", func(t *testing.T) {
		s := newScene(t, ascending, func(p, _ *enginesim.Config) {
			p.Extra = map[string]string{"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "0.05"}
		})
		s.prefill(completions, completion("x"))
		waitFor(t, "the time is over", func() bool { return s.p.Stats().Expired == 1 })
	})
}

func layered(p, d *enginesim.Config) {
	p.Connector, d.Connector = "ascend-layerwise", "ascend-layerwise"
}

// proxy is a proxy's callback server: it gives the callbacks, and answers them with
// a status.
func proxy(t *testing.T, status int) (url string, callbacks <-chan string, calls *atomic.Int64) {
	t.Helper()
	ch, calls := make(chan string, 8), new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		assert.Equal(t, http.MethodPost, r.Method)
		assert.Equal(t, "/v1/metaserver", r.URL.Path)
		b, _ := io.ReadAll(r.Body)
		w.WriteHeader(status)
		ch <- string(b)
	}))
	t.Cleanup(server.Close)
	return server.URL + "/v1/metaserver", ch, calls
}

// layerDecode sends D's leg.
func (s *scene) layerDecode(ctx context.Context, path string, body obj, url, id string) <-chan answer {
	ch := make(chan answer, 1)
	go func() {
		ch <- s.post(ctx, s.d, path, with(body, obj{"kv_transfer_params": obj{"do_remote_decode": false, "do_remote_prefill": true, "metaserver": url}}), "X-Request-Id", id)
	}()
	return ch
}

func (s *scene) layerPrefill(path string, body obj, params, id string) answer {
	return s.post(s.t.Context(), s.p, path, with(body, obj{"max_tokens": 1, "min_tokens": 1, "stream": false, "kv_transfer_params": json.RawMessage(params)}), "X-Request-Id", id)
}

func next(t *testing.T, callbacks <-chan string) string {
	t.Helper()
	select {
	case c := <-callbacks:
		return c
	case <-time.After(5 * time.Second):
		t.Fatal("D does not call back")
		return ""
	}
}

// TestLayerwisePush: D calls back with its blocks and its own id less the random
// end; P's answer tells nothing.
func TestLayerwisePush(t *testing.T) {
	for path, id := range map[string]string{completions: "cmpl-a-0", chat: "chatcmpl-a"} {
		t.Run(path, func(t *testing.T) {
			s := newScene(t, layered)
			url, callbacks, _ := proxy(t, 200)
			body := request(path, "x", 12)
			got := s.layerDecode(t.Context(), path, body, url, "a")
			c := next(t, callbacks)
			assert.Equal(t, id, gjson.Get(c, "request_id").String())
			assert.True(t, gjson.Get(c, "do_remote_decode").Bool())
			assert.Len(t, gjson.Parse(c).Map(), 13)
			p := s.layerPrefill(path, body, c, "a")
			require.Equal(t, 200, p.status, p.body)
			assert.Equal(t, gjson.Null, p.get("kv_transfer_params").Type)
			a := <-got
			require.Equal(t, 200, a.status, a.body)
			alone := s.post(t.Context(), s.o, path, body)
			assert.Equal(t, wholeText(alone), wholeText(a))
			assert.Positive(t, s.p.Stats().BytesTransferred, "P is the writer, and counts")
			assert.Zero(t, s.d.Stats().BytesTransferred)
			waitFor(t, "P is free", func() bool { return s.p.Stats().PinnedBlocks == 0 })
			assert.NoError(t, s.p.CheckKV())
			assert.NoError(t, s.d.CheckKV())
		})
	}
}

// TestLayerwiseDecodeThatNobodyPushesTo waits until its client leaves, and never gets
// its blocks back. The callback's status is not read.
func TestLayerwiseDecodeThatNobodyPushesTo(t *testing.T) {
	for name, act := range map[string]func(s *scene, body obj, callbacks <-chan string){
		"P is not asked": func(s *scene, _ obj, callbacks <-chan string) { next(s.t.(*testing.T), callbacks) },
		"P has another id": func(s *scene, body obj, callbacks <-chan string) {
			require.Equal(s.t, 200, s.layerPrefill(completions, body, next(s.t.(*testing.T), callbacks), "b").status)
		},
		"P is not told what for": func(s *scene, body obj, callbacks <-chan string) {
			c := next(s.t.(*testing.T), callbacks)
			var m obj
			require.NoError(s.t, json.Unmarshal([]byte(c), &m))
			delete(m, "do_remote_decode")
			raw, _ := json.Marshal(m)
			require.Equal(s.t, 200, s.layerPrefill(completions, body, string(raw), "a").status)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, layered)
			url, callbacks, calls := proxy(t, http.StatusBadGateway)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			got := s.layerDecode(ctx, completions, completion("x"), url, "a")
			act(s, completion("x"), callbacks)
			time.Sleep(50 * time.Millisecond)
			assert.Empty(t, got, "it was answered")
			assert.EqualValues(t, 1, calls.Load(), "a status is no reason to try again")
			leave()
			require.ErrorIs(t, (<-got).err, context.Canceled)
			waitFor(t, "D has given up", func() bool { return s.d.Stats().Waiting == 0 && s.d.Stats().Running == 0 })
			assert.Equal(t, 240/block+1, s.d.Stats().UsedBlocks, "its blocks are lost")
			waitFor(t, "P keeps nothing", func() bool { return s.p.Stats().PinnedBlocks == 0 })
		})
	}
}

// TestLayerwiseCallbackIsTriedThreeTimes where the connection breaks.
func TestLayerwiseCallbackIsTriedThreeTimes(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var calls atomic.Int64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			calls.Add(1)
			_ = conn.Close()
		}
	}()
	s := newScene(t, layered)
	ctx, leave := context.WithCancel(t.Context())
	got := s.layerDecode(ctx, completions, completion("x"), "http://"+ln.Addr().String()+"/v1/metaserver", "a")
	waitFor(t, "it gives up", func() bool { return calls.Load() == 3 })
	time.Sleep(50 * time.Millisecond)
	assert.EqualValues(t, 3, calls.Load())
	leave()
	<-got
	require.NoError(t, ln.Close())
	<-ended
}

// TestLayerwisePrefillDiesOfMissingKeys that it reads without asking.
func TestLayerwisePrefillDiesOfMissingKeys(t *testing.T) {
	good := obj{"do_remote_decode": true, "remote_block_ids": [][]int{{1}}, "remote_block_size": []int{32}, "remote_host": "127.0.0.1", "remote_port": 1, "remote_cached_tokens": 0}
	for name, change := range map[string]func(obj){
		"no remote_cached_tokens": without("remote_cached_tokens"), "no remote_block_ids": without("remote_block_ids"),
		"no remote_block_size": without("remote_block_size"), "no group": set("remote_block_ids", []any{}),
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, layered)
			params := with(good, nil)
			change(params)
			raw, _ := json.Marshal(params)
			assert.Equal(t, 500, s.layerPrefill(completions, completion("x"), string(raw), "a").status)
			s.dies(s.p)
		})
	}
}

func TestLayerwisePlainRequestsAreServedAlone(t *testing.T) {
	s := newScene(t, layered)
	assert.Equal(t, s.alone(completions, completion("x")), s.post(t.Context(), s.d, completions, completion("x")).text())
	require.NoError(t, s.d.Restart(), "on the same ports")
	s.alive(s.d)
}
