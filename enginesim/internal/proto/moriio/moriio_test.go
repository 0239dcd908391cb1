// SPDX-License-Identifier: Apache-2.0

package moriio_test

import (
	"fmt"
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
	return simtest.Of("moriio", "read_mode", mode, "version", version)
}

const moriHex = "00112233445566778899aabbccddeeff"

func zmqAddress(s *simtest.Scene, e *enginesim.Engine) string {
	_, port := simtest.Side(s.T, e)
	return fmt.Sprintf("host:127.0.0.1,handshake:%d,notify:%[1]d", port)
}

// moriID is the X-Request-Id by which engines find each other.
func moriID(s *simtest.Scene) string {
	return "___prefill_addr_" + zmqAddress(s, s.P) + "___decode_addr_" + zmqAddress(s, s.D) + "_" + moriHex
}

// asks are P's params, takes are D's; peer, if not nil, is named in them.
func asks(peer *enginesim.Engine) simtest.Obj {
	return simtest.With(simtest.Obj{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": nil,
		"remote_block_ids": nil, "transfer_id": "tx-1"}, at(peer))
}

func takes(peer *enginesim.Engine) simtest.Obj {
	return simtest.With(asks(peer), simtest.Obj{"do_remote_decode": false, "do_remote_prefill": true})
}

func at(e *enginesim.Engine) simtest.Obj {
	if e == nil {
		return nil
	}
	_, port, _ := net.SplitHostPort(e.SideChannel())
	n, _ := strconv.Atoi(port)
	return simtest.Obj{"remote_host": "127.0.0.1", "remote_handshake_port": n, "remote_notify_port": n}
}

func moriPrefill(s *simtest.Scene, body, params simtest.Obj, id string) simtest.Response {
	return s.Ask(s.P, simtest.With(simtest.Leg(body, params), simtest.Obj{"max_tokens": 1}), "X-Request-Id", id)
}

func moriDecode(s *simtest.Scene, body, params simtest.Obj, id string) <-chan simtest.Response {
	return s.AskLater(s.D, simtest.Leg(body, params), "X-Request-Id", id)
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
	for _, order := range simtest.Orders {
		for name, embedded := range map[string]bool{"addresses in the params": false, "addresses in the id": true} {
			t.Run(name+", "+order, func(t *testing.T) {
				s := simtest.New(t, mori("false"))
				body, id, p, d := simtest.Completion("x"), "plain", asks(s.D), takes(s.P)
				if embedded {
					id, p, d = moriID(s), asks(nil), takes(nil)
				}
				first := simtest.With(simtest.Leg(body, p), simtest.Obj{"max_tokens": 1})
				a, got := s.Both(order, first, simtest.Leg(body, d), "X-Request-Id", id)
				assert.Equal(t, "tx-1", a.Params(t)["transfer_id"])
				moriRight(s, body, got)
				assert.Positive(t, s.P.Stats().BytesTransferred, "P is the writer, and counts")
			})
		}
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
			h := a.Params(t)
			assert.EqualValues(t, (240+simtest.Block-1)/simtest.Block, a.Get("kv_transfer_params."+path).Int())
			moriRight(s, body, <-moriDecode(s, body, h, "x"))
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
			require.Equal(t, 200, moriPrefill(s, body, asks(s.D), "x").Status)
			decode := simtest.Leg(body, simtest.With(takes(s.P), simtest.Obj{"remote_dp_rank": 0}, k.params))
			header := []string{"X-Request-Id", "x", "X-data-parallel-rank", k.rank}
			if k.served {
				moriRight(s, body, s.Ask(s.D, decode, header...))
			} else {
				s.Waits(decode, header...)()
			}
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
		h := moriPrefill(s, body, asks(s.D), "x").Params(t)
		assert.EqualValues(t, 1, h["remote_dp_rank"])
		assert.EqualValues(t, 2, h["remote_dp_size"])
		assert.EqualValues(t, 1, h["remote_dp_size_local"])
		h["is_request_leader"], h["remote_hosts"] = true, []string{"192.0.2.1", "127.0.0.1"}
		moriRight(s, body, <-moriDecode(s, body, h, "x"))
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
	stops := func(s *simtest.Scene) simtest.Obj { return simtest.Obj{"stop": s.First(simtest.Completion("x"))} }
	for name, k := range map[string]struct {
		prefill func(s *simtest.Scene) simtest.Obj // P's parameters; nil: P is not asked
		body    func(s *simtest.Scene) simtest.Obj // that P's leg has besides
		plain   bool                               // D is told nothing
		decode  simtest.Obj                        // that D's parameters have otherwise
	}{
		"plain":            {plain: true},
		"empty params":     {plain: true, decode: simtest.Obj{}},
		"P is not asked":   {},
		"without its flag": {prefill: asksD, decode: simtest.Obj{"do_remote_prefill": false}},
		"another transfer": {prefill: asksD, decode: simtest.Obj{"transfer_id": "tx-2"}},
		"an id without tx": {prefill: func(s *simtest.Scene) simtest.Obj {
			return simtest.With(asksD(s), simtest.Obj{"transfer_id": "1"})
		}, decode: simtest.Obj{"transfer_id": "1"}},
		"P was told another D": {prefill: func(s *simtest.Scene) simtest.Obj { return asks(s.O) }},
		"D was told another P": {prefill: asksD, decode: simtest.Obj{"remote_handshake_port": 1}},
		"a wrong rank":         {prefill: asksD, decode: simtest.Obj{"remote_dp_rank": 1}},
		"P ended by stop":      {prefill: asksD, body: stops},
		"P did not know for whom": {prefill: func(s *simtest.Scene) simtest.Obj {
			return simtest.With(asksD(s), simtest.Obj{"do_remote_decode": false})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, moriOf("false", "0.28"))
			body, first := simtest.Completion("x"), simtest.Completion("x")
			if k.body != nil {
				first = simtest.With(first, k.body(s))
			}
			if k.prefill != nil {
				moriPrefill(s, first, k.prefill(s), "x")
			}
			params := k.decode
			if !k.plain {
				params = simtest.With(takes(s.P), k.decode)
			}
			s.Waits(simtest.Leg(body, params), "X-Request-Id", "x")()
			s.Lost()
		})
	}
}

func asksD(s *simtest.Scene) simtest.Obj { return asks(s.D) }

// readHandoff runs P in READ mode and gives what its response names.
func readHandoff(s *simtest.Scene) simtest.Obj {
	s.T.Helper()
	return moriPrefill(s, simtest.Completion("x"), asks(s.D), "x").Params(s.T)
}

// TestMoRIIODecodeThatReadsNothing is answered all the same, from memory that nobody wrote, before 0.33.
func TestMoRIIODecodeThatReadsNothing(t *testing.T) {
	body := simtest.Completion("x")
	for name, change := range map[string]func(simtest.Obj){
		"plain":                     func(h simtest.Obj) { clear(h) },
		"no blocks":                 simtest.Set("remote_block_ids", nil),
		"an empty list":             simtest.Set("remote_block_ids", []int{}),
		"no remote_engine_id":       simtest.Without("remote_engine_id"),
		"without do_remote_prefill": simtest.Set("do_remote_prefill", false),
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, moriOf("true", "0.32"))
			h := readHandoff(s)
			change(h)
			a := <-moriDecode(s, body, h, "x")
			require.Equal(t, 200, a.Status, a.Body)
			assert.NotEqual(t, s.Alone(body), a.Text())
			assert.Equal(t, enginesim.KVNoTransfer, simtest.FirstFault(t, s.D))
		})
	}
	t.Run("other blocks", func(t *testing.T) {
		s := simtest.New(t, mori("true"))
		h := readHandoff(s)
		slices.Reverse(h["remote_block_ids"].([]any)[0].([]any))
		assert.NotEqual(t, s.Alone(body), (<-moriDecode(s, body, h, "x")).Text())
		assert.Equal(t, enginesim.KVForeignRead, simtest.FirstFault(t, s.P))
	})
	t.Run("another transfer: P's blocks wait for defer_timeout", func(t *testing.T) {
		s := simtest.New(t, mori("true"), func(p, _ *enginesim.Config) { p.Extra["defer_timeout"] = "0.2" })
		h := readHandoff(s)
		h["transfer_id"] = "tx-2"
		require.Equal(t, 200, (<-moriDecode(s, body, h, "x")).Status)
		simtest.WaitFor(t, "the time is over", func() bool { return s.P.Stats().Expired == 1 })
	})
}

func TestMoRIIOParamsThatKill(t *testing.T) {
	body := simtest.Completion("x")
	for name, k := range map[string]struct {
		without string // a key; "": all that names the peer
		onD     bool
		id      string
	}{
		"P without transfer_id":      {without: "transfer_id"},
		"P without remote_block_ids": {without: "remote_block_ids"},
		"P without remote_engine_id": {without: "remote_engine_id"},
		"P without an address":       {},
		"P with half an address":     {without: "remote_notify_port"},
		"P with a broken id":         {id: "___prefill_addr_host:1___decode_addr_host:2_" + moriHex},
		"D without transfer_id":      {without: "transfer_id", onD: true},
		"D without an address":       {onD: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, mori("false"), simtest.OwnPorts(t))
			params, peer := asks, s.D
			if k.onD {
				params, peer = takes, s.P
			}
			if k.without == "" {
				peer = nil
			}
			h := params(peer)
			delete(h, k.without)
			if k.onD {
				s.Kills(s.D, <-moriDecode(s, body, h, "x"))
			} else {
				s.Kills(s.P, moriPrefill(s, body, h, k.id))
			}
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
			h := readHandoff(s)
			h["remote_block_ids"] = k.blocks
			s.Kills(s.D, <-moriDecode(s, body, h, "x"))
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
		a := <-moriDecode(s, simtest.Obj{"prompt": strings.Repeat("x", 3000)}, takes(s.P), "x")
		require.Equal(t, 400, a.Status)
		simtest.WaitFor(t, "P is free in mode "+mode, func() bool { return s.P.Stats().PinnedBlocks == 0 })
	}
}
