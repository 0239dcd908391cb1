// SPDX-License-Identifier: Apache-2.0

package moriio_test

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
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/pdflow/enginesim"
	"github.com/pdkit/pdkit/pdflow/enginesim/internal/scenetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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
func moriID(s *scenetest.Scene) string {
	return "___prefill_addr_" + zmqAddress(s.P) + "___decode_addr_" + zmqAddress(s.D) + "_" + moriHex
}

// asks are P's params, takes are D's; peer, if not nil, is named in them.
func asks(peer *enginesim.Engine) scenetest.Obj {
	return scenetest.With(scenetest.Obj{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil, "remote_block_ids": nil, "transfer_id": "tx-1"}, at(peer))
}

func takes(peer *enginesim.Engine) scenetest.Obj {
	return scenetest.With(scenetest.Obj{"do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": nil, "remote_block_ids": nil, "transfer_id": "tx-1"}, at(peer))
}

func at(e *enginesim.Engine) scenetest.Obj {
	if e == nil {
		return nil
	}
	return scenetest.Obj{"remote_host": "127.0.0.1", "remote_handshake_port": sidePort(e), "remote_notify_port": sidePort(e)}
}

func moriPrefill(s *scenetest.Scene, body, params scenetest.Obj, id string) scenetest.Answer {
	return s.Post(s.T.Context(), s.P, scenetest.Completions, scenetest.With(body, scenetest.Obj{"max_tokens": 1, "kv_transfer_params": params}), "X-Request-Id", id)
}

func moriDecode(ctx context.Context, s *scenetest.Scene, body, params scenetest.Obj, id string) <-chan scenetest.Answer {
	ch := make(chan scenetest.Answer, 1)
	go func() {
		ch <- s.Post(ctx, s.D, scenetest.Completions, scenetest.With(body, scenetest.Obj{"kv_transfer_params": params}), "X-Request-Id", id)
	}()
	return ch
}

func moriRight(s *scenetest.Scene, body scenetest.Obj, a scenetest.Answer) {
	s.T.Helper()
	require.NoError(s.T, a.Err)
	require.Equal(s.T, 200, a.Status, a.Body)
	assert.Equal(s.T, s.Alone(scenetest.Completions, body), a.Text())
	assert.EqualValues(s.T, 240, s.D.Stats().ExternalKVTransfer)
	scenetest.WaitFor(s.T, "P is free", func() bool { return s.P.Stats().PinnedBlocks == 0 })
	assert.NoError(s.T, s.P.CheckKV())
	assert.NoError(s.T, s.D.CheckKV())
}

// TestMoRIIOWrites: either leg may come first, and each finds its peer by the params
// or by the request's id.
func TestMoRIIOWrites(t *testing.T) {
	for name, k := range map[string]struct{ embedded, dFirst bool }{
		"addresses in the params, P first": {false, false}, "addresses in the params, D first": {false, true},
		"addresses in the id, P first": {true, false}, "addresses in the id, D first": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := scenetest.New(t, mori("false"))
			body, id, p, d := scenetest.Completion("x"), "plain", asks(s.D), takes(s.P)
			if k.embedded {
				id, p, d = moriID(s), asks(nil), takes(nil)
			}
			var got <-chan scenetest.Answer
			if k.dFirst {
				got = moriDecode(t.Context(), s, body, d, id)
				scenetest.WaitFor(t, "D waits", func() bool { return s.D.Stats().Waiting == 1 })
			}
			a := moriPrefill(s, body, p, id)
			require.Equal(t, 200, a.Status, a.Body)
			assert.Equal(t, "tx-1", a.Get("kv_transfer_params.transfer_id").String())
			if !k.dFirst {
				got = moriDecode(t.Context(), s, body, d, id)
			}
			moriRight(s, body, <-got)
			assert.Positive(t, s.P.Stats().BytesTransferred, "P is the writer, and counts")
		})
	}
}

// TestMoRIIOReads: P's answer names its blocks in a flat list.
func TestMoRIIOReads(t *testing.T) {
	s := scenetest.New(t, mori("1"))
	body := scenetest.Completion("x")
	a := moriPrefill(s, body, asks(s.D), "x")
	require.Equal(t, 200, a.Status, a.Body)
	var h scenetest.Obj
	require.NoError(t, json.Unmarshal([]byte(a.Get("kv_transfer_params").Raw), &h))
	assert.Len(t, h["remote_block_ids"], (240+scenetest.Block-1)/scenetest.Block)
	moriRight(s, body, <-moriDecode(t.Context(), s, body, h, "x"))
	assert.Positive(t, s.D.Stats().BytesTransferred, "D is the reader, and counts")
}

// TestMoRIIODecodeThatNobodyWritesTo waits until its client leaves: also a plain
// request, since a consumer counts every one as remote.
func TestMoRIIODecodeThatNobodyWritesTo(t *testing.T) {
	for name, act := range map[string]func(s *scenetest.Scene, body scenetest.Obj) scenetest.Obj{
		"plain":          func(*scenetest.Scene, scenetest.Obj) scenetest.Obj { return nil },
		"empty params":   func(*scenetest.Scene, scenetest.Obj) scenetest.Obj { return scenetest.Obj{} },
		"P is not asked": func(s *scenetest.Scene, _ scenetest.Obj) scenetest.Obj { return takes(s.P) },
		"without its flag": func(s *scenetest.Scene, body scenetest.Obj) scenetest.Obj {
			moriPrefill(s, body, asks(s.D), "x")
			return scenetest.With(takes(s.P), scenetest.Obj{"do_remote_prefill": false})
		},
		"another transfer": func(s *scenetest.Scene, body scenetest.Obj) scenetest.Obj {
			moriPrefill(s, body, asks(s.D), "x")
			return scenetest.With(takes(s.P), scenetest.Obj{"transfer_id": "tx-2"})
		},
		"an id without tx": func(s *scenetest.Scene, body scenetest.Obj) scenetest.Obj {
			moriPrefill(s, body, scenetest.With(asks(s.D), scenetest.Obj{"transfer_id": "1"}), "x")
			return scenetest.With(takes(s.P), scenetest.Obj{"transfer_id": "1"})
		},
		"P was told another D": func(s *scenetest.Scene, body scenetest.Obj) scenetest.Obj {
			moriPrefill(s, body, asks(s.O), "x")
			return takes(s.P)
		},
		"D was told another P": func(s *scenetest.Scene, body scenetest.Obj) scenetest.Obj {
			moriPrefill(s, body, asks(s.D), "x")
			return scenetest.With(takes(s.P), scenetest.Obj{"remote_handshake_port": 1})
		},
		"a wrong rank": func(s *scenetest.Scene, body scenetest.Obj) scenetest.Obj {
			moriPrefill(s, body, asks(s.D), "x")
			return scenetest.With(takes(s.P), scenetest.Obj{"remote_dp_rank": 1})
		},
		"P ended by stop": func(s *scenetest.Scene, body scenetest.Obj) scenetest.Obj {
			moriPrefill(s, scenetest.With(body, scenetest.Obj{"stop": first(s, body)}), asks(s.D), "x")
			return takes(s.P)
		},
		"P did not know for whom": func(s *scenetest.Scene, body scenetest.Obj) scenetest.Obj {
			moriPrefill(s, body, scenetest.With(asks(s.D), scenetest.Obj{"do_remote_decode": false}), "x")
			return takes(s.P)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := scenetest.New(t, mori("false"))
			body := scenetest.Completion("x")
			params := act(s, body)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			got := moriDecode(ctx, s, body, params, "x")
			scenetest.WaitFor(t, "D waits", func() bool { return s.D.Stats().Waiting == 1 })
			time.Sleep(50 * time.Millisecond)
			assert.Empty(t, got, "it was answered")
			leave()
			require.ErrorIs(t, (<-got).Err, context.Canceled)
			scenetest.WaitFor(t, "D has given up", func() bool { return s.D.Stats().Waiting == 0 })
			assert.Equal(t, 240/scenetest.Block+1, s.D.Stats().UsedBlocks, "its blocks are lost")
		})
	}
}

// first is the first token that a prompt gives.
func first(s *scenetest.Scene, body scenetest.Obj) string {
	return s.Post(s.T.Context(), s.O, scenetest.Completions, scenetest.With(body, scenetest.Obj{"max_tokens": 1})).Text()
}

// TestMoRIIODecodeThatReadsNothing is answered all the same, from memory that nobody
// wrote.
func TestMoRIIODecodeThatReadsNothing(t *testing.T) {
	for name, change := range map[string]func(scenetest.Obj){
		"plain":                     func(h scenetest.Obj) { clear(h) },
		"no blocks":                 scenetest.Set("remote_block_ids", nil),
		"an empty list":             scenetest.Set("remote_block_ids", []int{}),
		"no remote_engine_id":       scenetest.Without("remote_engine_id"),
		"without do_remote_prefill": scenetest.Set("do_remote_prefill", false),
	} {
		t.Run(name, func(t *testing.T) {
			s := scenetest.New(t, mori("true"))
			body := scenetest.Completion("x")
			var h scenetest.Obj
			require.NoError(t, json.Unmarshal([]byte(moriPrefill(s, body, asks(s.D), "x").Get("kv_transfer_params").Raw), &h))
			change(h)
			a := <-moriDecode(t.Context(), s, body, h, "x")
			require.Equal(t, 200, a.Status, a.Body)
			assert.NotEqual(t, s.Alone(scenetest.Completions, body), a.Text())
			assert.Equal(t, enginesim.KVNoTransfer, scenetest.FirstFault(t, s.D))
		})
	}
	t.Run("other blocks", func(t *testing.T) {
		s := scenetest.New(t, mori("true"))
		body := scenetest.Completion("x")
		var h scenetest.Obj
		require.NoError(t, json.Unmarshal([]byte(moriPrefill(s, body, asks(s.D), "x").Get("kv_transfer_params").Raw), &h))
		slices.Reverse(h["remote_block_ids"].([]any))
		a := <-moriDecode(t.Context(), s, body, h, "x")
		assert.NotEqual(t, s.Alone(scenetest.Completions, body), a.Text())
		assert.Equal(t, enginesim.KVForeignRead, scenetest.FirstFault(t, s.P))
	})
	t.Run("another transfer: P's blocks wait for defer_timeout", func(t *testing.T) {
		s := scenetest.New(t, mori("true"), func(p, _ *enginesim.Config) { p.Extra["defer_timeout"] = "0.2" })
		body := scenetest.Completion("x")
		var h scenetest.Obj
		require.NoError(t, json.Unmarshal([]byte(moriPrefill(s, body, asks(s.D), "x").Get("kv_transfer_params").Raw), &h))
		h["transfer_id"] = "tx-2"
		require.Equal(t, 200, (<-moriDecode(t.Context(), s, body, h, "x")).Status)
		scenetest.WaitFor(t, "the time is over", func() bool { return s.P.Stats().Expired == 1 })
	})
}

func TestMoRIIOParamsThatKill(t *testing.T) {
	for name, k := range map[string]struct {
		p, d func(s *scenetest.Scene) scenetest.Obj
		id   string
	}{
		"P without transfer_id":      {p: func(s *scenetest.Scene) scenetest.Obj { h := asks(s.D); delete(h, "transfer_id"); return h }},
		"P without remote_block_ids": {p: func(s *scenetest.Scene) scenetest.Obj { h := asks(s.D); delete(h, "remote_block_ids"); return h }},
		"P without remote_engine_id": {p: func(s *scenetest.Scene) scenetest.Obj { h := asks(s.D); delete(h, "remote_engine_id"); return h }},
		"P without an address":       {p: func(*scenetest.Scene) scenetest.Obj { return asks(nil) }},
		"P with half an address":     {p: func(s *scenetest.Scene) scenetest.Obj { h := asks(s.D); delete(h, "remote_notify_port"); return h }},
		"P with a broken id":         {p: func(*scenetest.Scene) scenetest.Obj { return asks(nil) }, id: "___prefill_addr_host:1___decode_addr_host:2_" + moriHex},
		"D without transfer_id":      {d: func(s *scenetest.Scene) scenetest.Obj { h := takes(s.P); delete(h, "transfer_id"); return h }},
		"D without an address":       {d: func(*scenetest.Scene) scenetest.Obj { return takes(nil) }},
	} {
		t.Run(name, func(t *testing.T) {
			s := scenetest.New(t, mori("false"))
			if k.p != nil {
				assert.Equal(t, 500, moriPrefill(s, scenetest.Completion("x"), k.p(s), k.id).Status)
				s.Dies(s.P)
				return
			}
			assert.Equal(t, 500, (<-moriDecode(t.Context(), s, scenetest.Completion("x"), k.d(s), "x")).Status)
			s.Dies(s.D)
		})
	}
	t.Run("READ with fewer blocks than D needs", func(t *testing.T) {
		s := scenetest.New(t, mori("true"))
		var h scenetest.Obj
		require.NoError(t, json.Unmarshal([]byte(moriPrefill(s, scenetest.Completion("x"), asks(s.D), "x").Get("kv_transfer_params").Raw), &h))
		h["remote_block_ids"] = h["remote_block_ids"].([]any)[:2]
		assert.Equal(t, 500, (<-moriDecode(t.Context(), s, scenetest.Completion("x"), h, "x")).Status)
		s.Dies(s.D)
	})
}

// TestMoRIIOResponses: the id of a response ends as the pattern does not allow, so
// only the params serve.
func TestMoRIIOResponses(t *testing.T) {
	s := scenetest.New(t, mori("false"))
	body := scenetest.With(scenetest.Request("/v1/responses", "x", 12), scenetest.Obj{"request_id": moriID(s)})
	a := s.Post(t.Context(), s.P, "/v1/responses", scenetest.With(body, scenetest.Obj{"max_output_tokens": 1, "kv_transfer_params": asks(s.D)}))
	require.Equal(t, 200, a.Status, a.Body)
	d := s.Post(t.Context(), s.D, "/v1/responses", scenetest.With(body, scenetest.Obj{"kv_transfer_params": takes(nil)}))
	require.Equal(t, 200, d.Status, "P's part is found: "+d.Body)
	assert.Equal(t, scenetest.WholeText(s.Post(t.Context(), s.O, "/v1/responses", body)), scenetest.WholeText(d))
	assert.Equal(t, 500, s.Post(t.Context(), s.P, "/v1/responses", scenetest.With(body, scenetest.Obj{"max_output_tokens": 1, "kv_transfer_params": asks(nil)})).Status, "D's is not")
	s.Dies(s.P)
}

// TestMoRIIODecodeThatIsRefusedLetsPGo, where the params say who that is.
func TestMoRIIODecodeThatIsRefusedLetsPGo(t *testing.T) {
	for _, mode := range []string{"false", "true"} {
		s := scenetest.New(t, mori(mode))
		require.Equal(t, 200, moriPrefill(s, scenetest.Completion("x"), asks(s.D), "x").Status)
		require.Positive(t, s.P.Stats().PinnedBlocks)
		time.Sleep(20 * time.Millisecond)
		a := <-moriDecode(t.Context(), s, scenetest.With(scenetest.Completion("x"), scenetest.Obj{"prompt": strings.Repeat("x", 3000)}), takes(s.P), "x")
		require.Equal(t, 400, a.Status)
		scenetest.WaitFor(t, "P is free in mode "+mode, func() bool { return s.P.Stats().PinnedBlocks == 0 })
	}
}
