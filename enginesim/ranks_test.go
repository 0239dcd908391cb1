// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"net"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

// podOf returns two addresses of this machine with n free ports in a row, for the second pod of an engine with ranks.
func podOf(t *testing.T, n int) (http, side string) {
	t.Helper()
	first, err := freeport.Find(3 * n)
	require.NoError(t, err)
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(first)), net.JoinHostPort("127.0.0.1", strconv.Itoa(first+n))
}

func TestEachRankHasPortsOfItsOwn(t *testing.T) {
	listen, side := podOf(t, 2)
	first, base := portOf(t, listen), portOf(t, side)
	ranks, err := enginesim.StartRanks(enginesim.Config{Connector: "nixl-push", KVRole: enginesim.RoleProducer,
		EngineID: "e", Listen: listen, SideChannel: side}, 2, 2)
	require.NoError(t, err)
	for i, e := range ranks {
		assert.Equal(t, "http://127.0.0.1:"+strconv.Itoa(first+i), e.URL())
		assert.Equal(t, "127.0.0.1:"+strconv.Itoa(base+2+i), e.SideChannel())
		assert.Equal(t, "e_dp"+strconv.Itoa(2+i), e.EngineID())
		require.NoError(t, e.Close())
	}
	for _, cfg := range []enginesim.Config{{}, {Listen: listen}, {Listen: "127.0.0.1:0", SideChannel: side},
		{Listen: listen, SideChannel: "127.0.0.1:65535"}, {Listen: listen, SideChannel: side, Connector: "x"}} {
		_, err := enginesim.StartRanks(cfg, 2, 2)
		require.Error(t, err)
	}
	_, err = enginesim.StartRanks(enginesim.Config{Listen: listen, SideChannel: side}, 0, 0)
	require.Error(t, err)
}

func portOf(t *testing.T, address string) int {
	t.Helper()
	_, text, err := net.SplitHostPort(address)
	require.NoError(t, err)
	port, err := strconv.Atoi(text)
	require.NoError(t, err)
	return port
}

// The second of two pods of an engine, with one HTTP port for its two ranks: a request names its rank by the number
// behind this port, and only the control port of that rank, by its number among all, has the prompt.
func TestRanksBehindOnePortHaveControlPortsOfTheirOwn(t *testing.T) {
	listen, side := podOf(t, 2)
	extra := map[string]string{"data_parallel_size_local": "2", "data_parallel_start_rank": "2", "load_timeout": "0.3"}
	s := simtest.New(t, func(p, d *enginesim.Config) {
		p.Connector, d.Connector = "offload-p2p", "offload-p2p"
		p.Listen, p.SideChannel, p.Extra = listen, side, extra
		d.Extra = map[string]string{"load_timeout": "0.3"}
	})
	ask := func(name, rank string, port int) (prefill, decode int, moved int64) {
		t.Helper()
		before := s.D.Stats().ExternalKVTransfer
		body := simtest.Completion(name)
		prefill = s.Post(t.Context(), s.P, simtest.Completions, simtest.With(body, simtest.Obj{"max_tokens": 1,
			"kv_transfer_params": simtest.Obj{"remote_decoder": simtest.Obj{"kv_request_id": name}}}),
			"X-data-parallel-rank", rank).Status
		a := s.Post(t.Context(), s.D, simtest.Completions, simtest.With(body,
			simtest.Obj{"kv_transfer_params": simtest.Obj{"remote_prefiller": simtest.Obj{"kv_request_id": name,
				"remote_host": "127.0.0.1", "remote_port": port}}}))
		assert.Equal(t, s.Alone(body), a.Text())
		return prefill, a.Status, s.D.Stats().ExternalKVTransfer - before
	}
	for _, c := range []struct {
		rule   string
		rank   string
		port   int // above the base
		status int
		moved  bool
	}{
		{"rank 2 of the engine", "0", 2, 200, true}, {"rank 3", "1", 3, 200, true},
		{"the port of the other rank", "1", 2, 200, false}, {"the port of the first pod's rank", "1", 1, 200, false},
		{"a number among all ranks", "3", 3, 400, false},
	} {
		prefill, decode, moved := ask(c.rule, c.rank, portOf(t, side)+c.port)
		assert.Equal(t, []any{c.status, 200, c.moved}, []any{prefill, decode, moved > 0}, c.rule)
	}
	require.NoError(t, s.P.Restart())
	n := 0
	simtest.WaitFor(t, "the ports are the same, once D has noticed that P is another process", func() bool {
		n++
		_, _, moved := ask("after a restart "+strconv.Itoa(n), "1", portOf(t, side)+3)
		return moved > 0
	})

	for _, of := range []map[string]string{extra, {"data_parallel_start_rank": "2"}} {
		_, err := enginesim.Start(enginesim.Config{Connector: "offload-p2p", Extra: of})
		require.ErrorContains(t, err, "SideChannel with a port")
	}
}
