// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"context"
	"encoding/json"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func mori(mode string) func(p, d *enginesim.Config) {
	return func(p, d *enginesim.Config) {
		p.Connector, d.Connector = "moriio", "moriio"
		p.Extra, d.Extra = map[string]string{"read_mode": mode}, map[string]string{"read_mode": mode}
	}
}

const moriHex = "00112233445566778899aabbccddeeff"

func sidePort(e *enginesim.Engine) int {
	_, port, _ := net.SplitHostPort(e.SideChannel())
	n, _ := strconv.Atoi(port)
	return n
}

func zmqAddress(e *enginesim.Engine) string {
	port := strconv.Itoa(sidePort(e))
	return "host:127.0.0.1,handshake:" + port + ",notify:" + port
}

// moriID is the X-Request-Id by which engines find each other.
func (s *scene) moriID() string {
	return "___prefill_addr_" + zmqAddress(s.p) + "___decode_addr_" + zmqAddress(s.d) + "_" + moriHex
}

// asks are P's params, takes are D's; peer, if not nil, is named in them.
func asks(peer *enginesim.Engine) obj {
	return with(obj{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil, "remote_block_ids": nil, "transfer_id": "tx-1"}, at(peer))
}

func takes(peer *enginesim.Engine) obj {
	return with(obj{"do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": nil, "remote_block_ids": nil, "transfer_id": "tx-1"}, at(peer))
}

func at(e *enginesim.Engine) obj {
	if e == nil {
		return nil
	}
	return obj{"remote_host": "127.0.0.1", "remote_handshake_port": sidePort(e), "remote_notify_port": sidePort(e)}
}

func (s *scene) moriPrefill(body, params obj, id string) answer {
	return s.post(s.t.Context(), s.p, completions, with(body, obj{"max_tokens": 1, "kv_transfer_params": params}), "X-Request-Id", id)
}

func (s *scene) moriDecode(ctx context.Context, body, params obj, id string) <-chan answer {
	ch := make(chan answer, 1)
	go func() {
		ch <- s.post(ctx, s.d, completions, with(body, obj{"kv_transfer_params": params}), "X-Request-Id", id)
	}()
	return ch
}

func (s *scene) moriRight(body obj, a answer) {
	s.t.Helper()
	require.NoError(s.t, a.err)
	require.Equal(s.t, 200, a.status, a.body)
	assert.Equal(s.t, s.alone(completions, body), a.text())
	assert.EqualValues(s.t, 240, s.d.Stats().ExternalKVTransfer)
	waitFor(s.t, "P is free", func() bool { return s.p.Stats().PinnedBlocks == 0 })
	assert.NoError(s.t, s.p.CheckKV())
	assert.NoError(s.t, s.d.CheckKV())
}

// TestMoRIIOWrites: either leg may come first, and each finds its peer by the params
// or by the request's id.
func TestMoRIIOWrites(t *testing.T) {
	for name, k := range map[string]struct{ embedded, dFirst bool }{
		"addresses in the params, P first": {false, false}, "addresses in the params, D first": {false, true},
		"addresses in the id, P first": {true, false}, "addresses in the id, D first": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, mori("false"))
			body, id, p, d := completion("x"), "plain", asks(s.d), takes(s.p)
			if k.embedded {
				id, p, d = s.moriID(), asks(nil), takes(nil)
			}
			var got <-chan answer
			if k.dFirst {
				got = s.moriDecode(t.Context(), body, d, id)
				waitFor(t, "D waits", func() bool { return s.d.Stats().Waiting == 1 })
			}
			a := s.moriPrefill(body, p, id)
			require.Equal(t, 200, a.status, a.body)
			assert.Equal(t, "tx-1", a.get("kv_transfer_params.transfer_id").String())
			if !k.dFirst {
				got = s.moriDecode(t.Context(), body, d, id)
			}
			s.moriRight(body, <-got)
			assert.Positive(t, s.p.Stats().BytesTransferred, "P is the writer, and counts")
		})
	}
}

// TestMoRIIOReads: P's answer names its blocks in a flat list.
func TestMoRIIOReads(t *testing.T) {
	s := newScene(t, mori("1"))
	body := completion("x")
	a := s.moriPrefill(body, asks(s.d), "x")
	require.Equal(t, 200, a.status, a.body)
	var h obj
	require.NoError(t, json.Unmarshal([]byte(a.get("kv_transfer_params").Raw), &h))
	assert.Len(t, h["remote_block_ids"], (240+block-1)/block)
	s.moriRight(body, <-s.moriDecode(t.Context(), body, h, "x"))
	assert.Positive(t, s.d.Stats().BytesTransferred, "D is the reader, and counts")
}

// TestMoRIIODecodeThatNobodyWritesTo waits until its client leaves: also a plain
// request, since a consumer counts every one as remote.
func TestMoRIIODecodeThatNobodyWritesTo(t *testing.T) {
	for name, act := range map[string]func(s *scene, body obj) obj{
		"plain":          func(*scene, obj) obj { return nil },
		"empty params":   func(*scene, obj) obj { return obj{} },
		"P is not asked": func(s *scene, _ obj) obj { return takes(s.p) },
		"without its flag": func(s *scene, body obj) obj {
			s.moriPrefill(body, asks(s.d), "x")
			return with(takes(s.p), obj{"do_remote_prefill": false})
		},
		"another transfer": func(s *scene, body obj) obj {
			s.moriPrefill(body, asks(s.d), "x")
			return with(takes(s.p), obj{"transfer_id": "tx-2"})
		},
		"an id without tx": func(s *scene, body obj) obj {
			s.moriPrefill(body, with(asks(s.d), obj{"transfer_id": "1"}), "x")
			return with(takes(s.p), obj{"transfer_id": "1"})
		},
		"P was told another D": func(s *scene, body obj) obj { s.moriPrefill(body, asks(s.o), "x"); return takes(s.p) },
		"D was told another P": func(s *scene, body obj) obj {
			s.moriPrefill(body, asks(s.d), "x")
			return with(takes(s.p), obj{"remote_handshake_port": 1})
		},
		"a wrong rank": func(s *scene, body obj) obj {
			s.moriPrefill(body, asks(s.d), "x")
			return with(takes(s.p), obj{"remote_dp_rank": 1})
		},
		"P ended by stop": func(s *scene, body obj) obj {
			s.moriPrefill(with(body, obj{"stop": s.first(body)}), asks(s.d), "x")
			return takes(s.p)
		},
		"P did not know for whom": func(s *scene, body obj) obj {
			s.moriPrefill(body, with(asks(s.d), obj{"do_remote_decode": false}), "x")
			return takes(s.p)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, mori("false"))
			body := completion("x")
			params := act(s, body)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			got := s.moriDecode(ctx, body, params, "x")
			waitFor(t, "D waits", func() bool { return s.d.Stats().Waiting == 1 })
			time.Sleep(50 * time.Millisecond)
			assert.Empty(t, got, "it was answered")
			leave()
			require.ErrorIs(t, (<-got).err, context.Canceled)
			waitFor(t, "D has given up", func() bool { return s.d.Stats().Waiting == 0 })
			assert.Equal(t, 240/block+1, s.d.Stats().UsedBlocks, "its blocks are lost")
		})
	}
}

// first is the first token that a prompt gives.
func (s *scene) first(body obj) string {
	return s.post(s.t.Context(), s.o, completions, with(body, obj{"max_tokens": 1})).text()
}

// TestMoRIIODecodeThatReadsNothing is answered all the same, from memory that nobody
// wrote.
func TestMoRIIODecodeThatReadsNothing(t *testing.T) {
	for name, change := range map[string]func(obj){
		"plain":                     func(h obj) { clear(h) },
		"no blocks":                 set("remote_block_ids", nil),
		"an empty list":             set("remote_block_ids", []int{}),
		"no remote_engine_id":       without("remote_engine_id"),
		"without do_remote_prefill": set("do_remote_prefill", false),
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, mori("true"))
			body := completion("x")
			var h obj
			require.NoError(t, json.Unmarshal([]byte(s.moriPrefill(body, asks(s.d), "x").get("kv_transfer_params").Raw), &h))
			change(h)
			a := <-s.moriDecode(t.Context(), body, h, "x")
			require.Equal(t, 200, a.status, a.body)
			assert.NotEqual(t, s.alone(completions, body), a.text())
			assert.Equal(t, enginesim.KVNoTransfer, firstFault(t, s.d))
		})
	}
	t.Run("other blocks", func(t *testing.T) {
		s := newScene(t, mori("true"))
		body := completion("x")
		var h obj
		require.NoError(t, json.Unmarshal([]byte(s.moriPrefill(body, asks(s.d), "x").get("kv_transfer_params").Raw), &h))
		slices.Reverse(h["remote_block_ids"].([]any))
		a := <-s.moriDecode(t.Context(), body, h, "x")
		assert.NotEqual(t, s.alone(completions, body), a.text())
		assert.Equal(t, enginesim.KVForeignRead, firstFault(t, s.p))
	})
	t.Run("another transfer: P's blocks wait for defer_timeout", func(t *testing.T) {
		s := newScene(t, mori("true"), func(p, _ *enginesim.Config) { p.Extra["defer_timeout"] = "0.2" })
		body := completion("x")
		var h obj
		require.NoError(t, json.Unmarshal([]byte(s.moriPrefill(body, asks(s.d), "x").get("kv_transfer_params").Raw), &h))
		h["transfer_id"] = "tx-2"
		require.Equal(t, 200, (<-s.moriDecode(t.Context(), body, h, "x")).status)
		waitFor(t, "the time is over", func() bool { return s.p.Stats().Expired == 1 })
	})
}

func TestMoRIIOParamsThatKill(t *testing.T) {
	for name, k := range map[string]struct {
		p, d func(s *scene) obj
		id   string
	}{
		"P without transfer_id":      {p: func(s *scene) obj { h := asks(s.d); delete(h, "transfer_id"); return h }},
		"P without remote_block_ids": {p: func(s *scene) obj { h := asks(s.d); delete(h, "remote_block_ids"); return h }},
		"P without remote_engine_id": {p: func(s *scene) obj { h := asks(s.d); delete(h, "remote_engine_id"); return h }},
		"P without an address":       {p: func(*scene) obj { return asks(nil) }},
		"P with half an address":     {p: func(s *scene) obj { h := asks(s.d); delete(h, "remote_notify_port"); return h }},
		"P with a broken id":         {p: func(*scene) obj { return asks(nil) }, id: "___prefill_addr_host:1___decode_addr_host:2_" + moriHex},
		"D without transfer_id":      {d: func(s *scene) obj { h := takes(s.p); delete(h, "transfer_id"); return h }},
		"D without an address":       {d: func(*scene) obj { return takes(nil) }},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, mori("false"))
			if k.p != nil {
				assert.Equal(t, 500, s.moriPrefill(completion("x"), k.p(s), k.id).status)
				s.dies(s.p)
				return
			}
			assert.Equal(t, 500, (<-s.moriDecode(t.Context(), completion("x"), k.d(s), "x")).status)
			s.dies(s.d)
		})
	}
	t.Run("READ with fewer blocks than D needs", func(t *testing.T) {
		s := newScene(t, mori("true"))
		var h obj
		require.NoError(t, json.Unmarshal([]byte(s.moriPrefill(completion("x"), asks(s.d), "x").get("kv_transfer_params").Raw), &h))
		h["remote_block_ids"] = h["remote_block_ids"].([]any)[:2]
		assert.Equal(t, 500, (<-s.moriDecode(t.Context(), completion("x"), h, "x")).status)
		s.dies(s.d)
	})
}

// TestMoRIIOResponses: the id of a response ends as the pattern does not allow, so
// only the params serve.
func TestMoRIIOResponses(t *testing.T) {
	s := newScene(t, mori("false"))
	body := with(request("/v1/responses", "x", 12), obj{"request_id": s.moriID()})
	a := s.post(t.Context(), s.p, "/v1/responses", with(body, obj{"max_output_tokens": 1, "kv_transfer_params": asks(s.d)}))
	require.Equal(t, 200, a.status, a.body)
	d := s.post(t.Context(), s.d, "/v1/responses", with(body, obj{"kv_transfer_params": takes(nil)}))
	require.Equal(t, 200, d.status, "P's part is found: "+d.body)
	assert.Equal(t, wholeText(s.post(t.Context(), s.o, "/v1/responses", body)), wholeText(d))
	assert.Equal(t, 500, s.post(t.Context(), s.p, "/v1/responses", with(body, obj{"max_output_tokens": 1, "kv_transfer_params": asks(nil)})).status, "D's is not")
	s.dies(s.p)
}

// TestMoRIIODecodeThatIsRefusedLetsPGo, where the params say who that is.
func TestMoRIIODecodeThatIsRefusedLetsPGo(t *testing.T) {
	for _, mode := range []string{"false", "true"} {
		s := newScene(t, mori(mode))
		require.Equal(t, 200, s.moriPrefill(completion("x"), asks(s.d), "x").status)
		require.Positive(t, s.p.Stats().PinnedBlocks)
		time.Sleep(20 * time.Millisecond)
		a := <-s.moriDecode(t.Context(), with(completion("x"), obj{"prompt": strings.Repeat("x", 3000)}), takes(s.p), "x")
		require.Equal(t, 400, a.status)
		waitFor(t, "P is free in mode "+mode, func() bool { return s.p.Stats().PinnedBlocks == 0 })
	}
}
