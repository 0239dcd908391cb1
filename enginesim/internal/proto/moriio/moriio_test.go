// SPDX-License-Identifier: Apache-2.0

package moriio_test

import (
	"context"
	"encoding/json"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func mori(mode string) func(p, d *enginesim.Config) { return moriOf(mode, "") }

// moriOf is mori of a release of vLLM.
func moriOf(mode, version string) func(p, d *enginesim.Config) {
	return func(p, d *enginesim.Config) {
		p.Connector, d.Connector = "moriio", "moriio"
		p.Extra = map[string]string{"read_mode": mode, "version": version}
		d.Extra = maps.Clone(p.Extra)
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
func moriID(s *simtest.Scene) string {
	return "___prefill_addr_" + zmqAddress(s.P) + "___decode_addr_" + zmqAddress(s.D) + "_" + moriHex
}

// asks are P's params, takes are D's; peer, if not nil, is named in them.
func asks(peer *enginesim.Engine) simtest.Obj {
	return simtest.With(simtest.Obj{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil,
		"remote_block_ids": nil, "transfer_id": "tx-1"}, at(peer))
}

func takes(peer *enginesim.Engine) simtest.Obj {
	return simtest.With(simtest.Obj{"do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": nil,
		"remote_block_ids": nil, "transfer_id": "tx-1"}, at(peer))
}

func at(e *enginesim.Engine) simtest.Obj {
	if e == nil {
		return nil
	}
	return simtest.Obj{"remote_host": "127.0.0.1", "remote_handshake_port": sidePort(e),
		"remote_notify_port": sidePort(e)}
}

func moriPrefill(s *simtest.Scene, body, params simtest.Obj, id string) simtest.Response {
	return s.Ask(s.P, simtest.With(body, simtest.Obj{"max_tokens": 1, "kv_transfer_params": params}), "X-Request-Id", id)
}

func moriDecode(ctx context.Context, s *simtest.Scene, body, params simtest.Obj, id string,
	header ...string) <-chan simtest.Response {
	ch := make(chan simtest.Response, 1)
	go func() {
		ch <- s.Post(ctx, s.D, simtest.Completions, simtest.With(body, simtest.Obj{"kv_transfer_params": params}),
			append(header, "X-Request-Id", id)...)
	}()
	return ch
}

func moriRight(s *simtest.Scene, body simtest.Obj, a simtest.Response) {
	s.T.Helper()
	s.Right(body, a)
	assert.EqualValues(s.T, 240, s.D.Stats().ExternalKVTransfer)
	simtest.WaitFor(s.T, "P is free", func() bool { return s.P.Stats().PinnedBlocks == 0 })
	s.Clean()
}

// TestMoRIIOWrites: either leg may come first, and each finds its peer by the params or by the request's id.
func TestMoRIIOWrites(t *testing.T) {
	for name, k := range map[string]struct{ embedded, dFirst bool }{
		"addresses in the params, P first": {false, false}, "addresses in the params, D first": {false, true},
		"addresses in the id, P first": {true, false}, "addresses in the id, D first": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, mori("false"))
			body, id, p, d := simtest.Completion("x"), "plain", asks(s.D), takes(s.P)
			if k.embedded {
				id, p, d = moriID(s), asks(nil), takes(nil)
			}
			var got <-chan simtest.Response
			if k.dFirst {
				got = moriDecode(t.Context(), s, body, d, id)
				simtest.WaitFor(t, "D waits", func() bool { return s.D.Stats().Waiting == 1 })
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

// TestMoRIIOReads: P's response names its blocks, flat in older releases, and since 0.32 in a list for each cache
// group.
func TestMoRIIOReads(t *testing.T) {
	for version, path := range map[string]string{"0.28": "remote_block_ids.#", "0.32": "remote_block_ids.0.#",
		"0.33": "remote_block_ids.0.#", "": "remote_block_ids.0.#"} {
		t.Run(version, func(t *testing.T) {
			s := simtest.New(t, moriOf("1", version))
			body := simtest.Completion("x")
			a := moriPrefill(s, body, asks(s.D), "x")
			require.Equal(t, 200, a.Status, a.Body)
			var h simtest.Obj
			require.NoError(t, json.Unmarshal([]byte(a.Get("kv_transfer_params").Raw), &h))
			assert.EqualValues(t, (240+simtest.Block-1)/simtest.Block, a.Get("kv_transfer_params."+path).Int())
			moriRight(s, body, <-moriDecode(t.Context(), s, body, h, "x"))
			assert.Positive(t, s.D.Stats().BytesTransferred, "D is the reader, and counts")
		})
	}
}

// TestMoRIIORanks: the rank of D that has the request tells P about its blocks if the params call it the leader, or,
// where they do not say, if it has P's number.
func TestMoRIIORanks(t *testing.T) {
	for name, k := range map[string]struct {
		rank   string
		params simtest.Obj
		served bool
	}{
		"P's number":                  {"0", simtest.Obj{"remote_dp_rank_override": true}, true},
		"another number":              {"2", simtest.Obj{"remote_dp_rank_override": true}, false},
		"another number, the leader":  {"2", simtest.Obj{"is_request_leader": true}, true},
		"P's number, not the leader":  {"0", simtest.Obj{"is_request_leader": false}, false},
		"the first, where none says":  {"0", nil, true},
		"another, where none says it": {"2", nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, mori("false"), func(_, d *enginesim.Config) {
				d.Extra["data_parallel_size_local"] = "3"
			})
			body := simtest.Completion("x")
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			got := moriDecode(ctx, s, body, simtest.With(takes(s.P), simtest.With(simtest.Obj{"remote_dp_rank": 0},
				k.params)), "x", "X-data-parallel-rank", k.rank)
			require.Equal(t, 200, moriPrefill(s, body, asks(s.D), "x").Status)
			if k.served {
				moriRight(s, body, <-got)
				return
			}
			simtest.WaitFor(t, "D waits", func() bool { return s.D.Stats().Waiting == 1 })
			time.Sleep(50 * time.Millisecond)
			assert.Empty(t, got, "it was answered")
			leave()
			<-got
		})
	}
}

// TestMoRIIOSeveralPods: D finds the pod of P's rank by remote_hosts and remote_dp_size_local, and P names its rank
// among those of all pods.
func TestMoRIIOSeveralPods(t *testing.T) {
	for _, mode := range []string{"false", "true"} {
		s := simtest.New(t, mori(mode), func(p, _ *enginesim.Config) {
			p.Extra["data_parallel_size"], p.Extra["data_parallel_start_rank"] = "2", "1"
		})
		body := simtest.Completion("x")
		a := moriPrefill(s, body, asks(s.D), "x")
		var h simtest.Obj
		require.NoError(t, json.Unmarshal([]byte(a.Get("kv_transfer_params").Raw), &h))
		assert.EqualValues(t, 1, h["remote_dp_rank"])
		assert.EqualValues(t, 2, h["remote_dp_size"])
		assert.EqualValues(t, 1, h["remote_dp_size_local"])
		h["is_request_leader"], h["remote_hosts"] = true, []string{"192.0.2.1", "127.0.0.1"}
		moriRight(s, body, <-moriDecode(t.Context(), s, body, h, "x"))
	}
}

// TestMoRIIODecodeAlone: since 0.32 in WRITE, and since 0.33 in both modes, a consumer serves a plain request alone.
func TestMoRIIODecodeAlone(t *testing.T) {
	for _, k := range [][2]string{{"false", "0.32"}, {"false", "0.33"}, {"true", "0.33"}, {"true", ""}} {
		s := simtest.New(t, moriOf(k[0], k[1]))
		body := simtest.Completion("x")
		a := s.Ask(s.D, body)
		require.Equal(t, 200, a.Status, a.Body)
		assert.Equal(t, s.Alone(body), a.Text(), "%v", k)
	}
	s := simtest.New(t, moriOf("true", "0.32"))
	a := s.Ask(s.D, simtest.Completion("x"))
	assert.NotEqual(t, s.Alone(simtest.Completion("x")), a.Text(), "READ of 0.32")
	_, err := enginesim.Start(enginesim.Config{Connector: "moriio", Extra: map[string]string{"version": "0.31"}})
	require.ErrorContains(t, err, "version")
}

// TestMoRIIODecodeThatNobodyWritesTo waits until its client leaves: before 0.32 also a plain request, since a consumer
// counts every one as remote.
func TestMoRIIODecodeThatNobodyWritesTo(t *testing.T) {
	for name, act := range map[string]func(s *simtest.Scene, body simtest.Obj) simtest.Obj{
		"plain":          func(*simtest.Scene, simtest.Obj) simtest.Obj { return nil },
		"empty params":   func(*simtest.Scene, simtest.Obj) simtest.Obj { return simtest.Obj{} },
		"P is not asked": func(s *simtest.Scene, _ simtest.Obj) simtest.Obj { return takes(s.P) },
		"without its flag": func(s *simtest.Scene, body simtest.Obj) simtest.Obj {
			moriPrefill(s, body, asks(s.D), "x")
			return simtest.With(takes(s.P), simtest.Obj{"do_remote_prefill": false})
		},
		"another transfer": func(s *simtest.Scene, body simtest.Obj) simtest.Obj {
			moriPrefill(s, body, asks(s.D), "x")
			return simtest.With(takes(s.P), simtest.Obj{"transfer_id": "tx-2"})
		},
		"an id without tx": func(s *simtest.Scene, body simtest.Obj) simtest.Obj {
			moriPrefill(s, body, simtest.With(asks(s.D), simtest.Obj{"transfer_id": "1"}), "x")
			return simtest.With(takes(s.P), simtest.Obj{"transfer_id": "1"})
		},
		"P was told another D": func(s *simtest.Scene, body simtest.Obj) simtest.Obj {
			moriPrefill(s, body, asks(s.O), "x")
			return takes(s.P)
		},
		"D was told another P": func(s *simtest.Scene, body simtest.Obj) simtest.Obj {
			moriPrefill(s, body, asks(s.D), "x")
			return simtest.With(takes(s.P), simtest.Obj{"remote_handshake_port": 1})
		},
		"a wrong rank": func(s *simtest.Scene, body simtest.Obj) simtest.Obj {
			moriPrefill(s, body, asks(s.D), "x")
			return simtest.With(takes(s.P), simtest.Obj{"remote_dp_rank": 1})
		},
		"P ended by stop": func(s *simtest.Scene, body simtest.Obj) simtest.Obj {
			moriPrefill(s, simtest.With(body, simtest.Obj{"stop": first(s, body)}), asks(s.D), "x")
			return takes(s.P)
		},
		"P did not know for whom": func(s *simtest.Scene, body simtest.Obj) simtest.Obj {
			moriPrefill(s, body, simtest.With(asks(s.D), simtest.Obj{"do_remote_decode": false}), "x")
			return takes(s.P)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, moriOf("false", "0.28"))
			body := simtest.Completion("x")
			params := act(s, body)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			got := moriDecode(ctx, s, body, params, "x")
			simtest.WaitFor(t, "D waits", func() bool { return s.D.Stats().Waiting == 1 })
			time.Sleep(50 * time.Millisecond)
			assert.Empty(t, got, "it was answered")
			leave()
			require.ErrorIs(t, (<-got).Err, context.Canceled)
			simtest.WaitFor(t, "D has given up", func() bool { return s.D.Stats().Waiting == 0 })
			assert.Equal(t, 240/simtest.Block+1, s.D.Stats().UsedBlocks, "its blocks are lost")
		})
	}
}

// first is the first token that a prompt gives.
func first(s *simtest.Scene, body simtest.Obj) string {
	return s.Ask(s.O, simtest.With(body, simtest.Obj{"max_tokens": 1})).Text()
}

// TestMoRIIODecodeThatReadsNothing is answered all the same, from memory that nobody wrote, before 0.33.
func TestMoRIIODecodeThatReadsNothing(t *testing.T) {
	for name, change := range map[string]func(simtest.Obj){
		"plain":                     func(h simtest.Obj) { clear(h) },
		"no blocks":                 simtest.Set("remote_block_ids", nil),
		"an empty list":             simtest.Set("remote_block_ids", []int{}),
		"no remote_engine_id":       simtest.Without("remote_engine_id"),
		"without do_remote_prefill": simtest.Set("do_remote_prefill", false),
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, moriOf("true", "0.32"))
			body := simtest.Completion("x")
			var h simtest.Obj
			require.NoError(t,
				json.Unmarshal([]byte(moriPrefill(s, body, asks(s.D), "x").Get("kv_transfer_params").Raw), &h))
			change(h)
			a := <-moriDecode(t.Context(), s, body, h, "x")
			require.Equal(t, 200, a.Status, a.Body)
			assert.NotEqual(t, s.Alone(body), a.Text())
			assert.Equal(t, enginesim.KVNoTransfer, simtest.FirstFault(t, s.D))
		})
	}
	t.Run("other blocks", func(t *testing.T) {
		s := simtest.New(t, mori("true"))
		body := simtest.Completion("x")
		var h simtest.Obj
		require.NoError(t, json.Unmarshal([]byte(moriPrefill(s, body, asks(s.D), "x").Get("kv_transfer_params").Raw),
			&h))
		slices.Reverse(h["remote_block_ids"].([]any)[0].([]any))
		a := <-moriDecode(t.Context(), s, body, h, "x")
		assert.NotEqual(t, s.Alone(body), a.Text())
		assert.Equal(t, enginesim.KVForeignRead, simtest.FirstFault(t, s.P))
	})
	t.Run("another transfer: P's blocks wait for defer_timeout", func(t *testing.T) {
		s := simtest.New(t, mori("true"), func(p, _ *enginesim.Config) { p.Extra["defer_timeout"] = "0.2" })
		body := simtest.Completion("x")
		var h simtest.Obj
		require.NoError(t, json.Unmarshal([]byte(moriPrefill(s, body, asks(s.D), "x").Get("kv_transfer_params").Raw),
			&h))
		h["transfer_id"] = "tx-2"
		require.Equal(t, 200, (<-moriDecode(t.Context(), s, body, h, "x")).Status)
		simtest.WaitFor(t, "the time is over", func() bool { return s.P.Stats().Expired == 1 })
	})
}

func TestMoRIIOParamsThatKill(t *testing.T) {
	for name, k := range map[string]struct {
		p, d func(s *simtest.Scene) simtest.Obj
		id   string
	}{
		"P without transfer_id": {p: func(s *simtest.Scene) simtest.Obj {
			h := asks(s.D)
			delete(h,
				"transfer_id")
			return h
		}},
		"P without remote_block_ids": {p: func(s *simtest.Scene) simtest.Obj {
			h := asks(s.D)
			delete(h,
				"remote_block_ids")
			return h
		}},
		"P without remote_engine_id": {p: func(s *simtest.Scene) simtest.Obj {
			h := asks(s.D)
			delete(h,
				"remote_engine_id")
			return h
		}},
		"P without an address": {p: func(*simtest.Scene) simtest.Obj { return asks(nil) }},
		"P with half an address": {p: func(s *simtest.Scene) simtest.Obj {
			h := asks(s.D)
			delete(h,
				"remote_notify_port")
			return h
		}},
		"P with a broken id": {p: func(*simtest.Scene) simtest.Obj { return asks(nil) },
			id: "___prefill_addr_host:1___decode_addr_host:2_" + moriHex},
		"D without transfer_id": {d: func(s *simtest.Scene) simtest.Obj {
			h := takes(s.P)
			delete(h,
				"transfer_id")
			return h
		}},
		"D without an address": {d: func(*simtest.Scene) simtest.Obj { return takes(nil) }},
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, mori("false"), simtest.OwnPorts(t))
			if k.p != nil {
				assert.Equal(t, 500, moriPrefill(s, simtest.Completion("x"), k.p(s), k.id).Status)
				s.Dies(s.P)
				return
			}
			assert.Equal(t, 500, (<-moriDecode(t.Context(), s, simtest.Completion("x"), k.d(s), "x")).Status)
			s.Dies(s.D)
		})
	}
	for name, k := range map[string]struct {
		version string
		blocks  any
	}{
		"READ with fewer blocks than D needs": {"", [][]int{{1, 2}}},
		"READ with a flat list":               {"", []int{1, 2, 3, 4, 5, 6, 7, 8}},
		"READ with groups before 0.32":        {"0.28", [][]int{{1, 2, 3, 4, 5, 6, 7, 8}}},
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, moriOf("true", k.version), simtest.OwnPorts(t))
			var h simtest.Obj
			require.NoError(t,
				json.Unmarshal([]byte(moriPrefill(s, simtest.Completion("x"), asks(s.D),
					"x").Get("kv_transfer_params").Raw), &h))
			h["remote_block_ids"] = k.blocks
			assert.Equal(t, 500, (<-moriDecode(t.Context(), s, simtest.Completion("x"), h, "x")).Status)
			s.Dies(s.D)
		})
	}
}

// TestMoRIIOResponses: the id of a response ends as the pattern does not allow, so only the params serve.
func TestMoRIIOResponses(t *testing.T) {
	s := simtest.New(t, mori("false"), simtest.OwnPorts(t))
	body := simtest.With(simtest.Request("/v1/responses", "x", 12), simtest.Obj{"request_id": moriID(s)})
	a := s.Post(t.Context(), s.P, "/v1/responses", simtest.With(body,
		simtest.Obj{"max_output_tokens": 1, "kv_transfer_params": asks(s.D)}))
	require.Equal(t, 200, a.Status, a.Body)
	d := s.Post(t.Context(), s.D, "/v1/responses", simtest.With(body, simtest.Obj{"kv_transfer_params": takes(nil)}))
	require.Equal(t, 200, d.Status, "P's part is found: "+d.Body)
	assert.Equal(t, s.Post(t.Context(), s.O, "/v1/responses", body).Text(), d.Text())
	assert.Equal(t, 500, s.Post(t.Context(), s.P, "/v1/responses",
		simtest.With(body, simtest.Obj{"max_output_tokens": 1,
			"kv_transfer_params": asks(nil)})).Status, "D's is not")
	s.Dies(s.P)
}

// TestMoRIIODecodeThatIsRefusedLetsPGo, where the params say who that is.
func TestMoRIIODecodeThatIsRefusedLetsPGo(t *testing.T) {
	for _, mode := range []string{"false", "true"} {
		s := simtest.New(t, mori(mode))
		require.Equal(t, 200, moriPrefill(s, simtest.Completion("x"), asks(s.D), "x").Status)
		require.Positive(t, s.P.Stats().PinnedBlocks)
		time.Sleep(time.Second) // P offers it after it has answered
		a := <-moriDecode(t.Context(), s, simtest.With(simtest.Completion("x"),
			simtest.Obj{"prompt": strings.Repeat("x", 3000)}), takes(s.P), "x")
		require.Equal(t, 400, a.Status)
		simtest.WaitFor(t, "P is free in mode "+mode, func() bool { return s.P.Stats().PinnedBlocks == 0 })
	}
}
