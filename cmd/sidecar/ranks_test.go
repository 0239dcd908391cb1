// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/internal/sharedtest"
)

// ports returns the first of n free ports in a row. They are below the range from which systems choose free ports
// themselves.
func ports(t *testing.T, n int) int {
	t.Helper()
	first, err := freeport.Find(n)
	require.NoError(t, err)
	return first
}

// ranked is two data-parallel ranks on one host, each with an engine for prefill and one for decode, and their sidecar.
type ranked struct {
	prefill, decode [2]*enginesim.Engine
	port            int // of the sidecar's rank 0
	p               int // of rank 0's prefill engine
	side            *program
}

func ranks(t *testing.T, decode enginesim.Config, env map[string]string, args ...string) ranked {
	t.Helper()
	x := ranked{port: ports(t, 2), p: ports(t, 2)}
	d := ports(t, 2)
	for r := range 2 {
		config := decode
		config.Listen = "127.0.0.1:" + strconv.Itoa(d+r)
		x.prefill[r], x.decode[r] = twoEngines(t, enginesim.Config{Listen: x.prefiller(r)}, config)
	}
	x.side = start(t, env, append([]string{"--port=" + strconv.Itoa(x.port), "--vllm-port=" +
		strconv.Itoa(d), "--data-parallel-size=2", "--secure-serving=false",
		fmt.Sprintf("--prefillers=127.0.0.1:%d-%d", x.p, x.p+1)}, args...)...)
	require.Eventually(t, func() bool { return bytes.Count([]byte(x.side.log.String()), []byte("msg=serving")) == 2 },
		20*time.Second, time.Millisecond)
	return x
}

func (x *ranked) addr(rank int) string { return "127.0.0.1:" + strconv.Itoa(x.port+rank) }

func (x *ranked) prefiller(rank int) string { return "127.0.0.1:" + strconv.Itoa(x.p+rank) }

// served is how many requests each decode engine got.
func (x *ranked) served() [2]int {
	return [2]int{len(x.decode[0].Requests()), len(x.decode[1].Requests())}
}

// As in llm-d's sidecar, rank r is served at --port + r, by the engine at --model-server-port + r.
func TestEachRankHasAPortOfItsOwn(t *testing.T) {
	x := ranks(t, enginesim.Config{}, nil)
	n := 0
	for rank, want := range [][2]int{{3, 0}, {3, 3}} {
		for _, stream := range []bool{false, true} {
			n++
			status, h, response := complete(t, x.addr(rank), n, stream, header, x.prefiller(rank))
			require.Equal(t, http.StatusOK, status, response)
			assert.Equal(t, "disaggregated", h.Get("X-Pd-Mode"))
		}
		status, h, _ := complete(t, x.addr(rank), 0, false)
		require.Equal(t, http.StatusOK, status)
		assert.Equal(t, "aggregated", h.Get("X-Pd-Mode"))
		assert.Equal(t, want, x.served())
		assert.Positive(t, x.decode[rank].Stats().ExternalKVTransfer)
		for _, path := range []string{"/health", "/v1/models"} {
			assert.Equal(t, http.StatusOK, statusOf(fetch(t, x.addr(rank)+path)), "probes of rank %d: %s", rank, path)
		}
	}
	require.NoError(t, x.decode[1].Close())
	assert.Equal(t, http.StatusServiceUnavailable,
		statusOf(fetch(t, x.addr(1)+"/v1/models")), "other paths go to the rank's own engine")
}

// The old way is for gateways that know only rank 0's port: the header has the pod's address and the rank's port.
func TestTheHeaderChoosesARankAtTheFirstPort(t *testing.T) {
	x := ranks(t, enginesim.Config{}, map[string]string{"POD_IP": "10.9.8.7"})
	const name = "x-data-parallel-host-port"
	send := func(rank int, headers ...string) int {
		return statusOf(complete(t, x.addr(rank), 0, false, headers...))
	}
	of := func(rank int) string { return "10.9.8.7:" + strconv.Itoa(x.port+rank) }
	require.Equal(t, http.StatusOK, send(0, name, of(1)))
	assert.Equal(t, [2]int{0, 1}, x.served())
	require.Equal(t, http.StatusOK, send(0, name, of(0)))
	assert.Equal(t, [2]int{1, 1}, x.served())
	require.Equal(t, http.StatusOK, send(0, name, of(1), header, x.prefiller(0)))
	assert.Equal(t, [2]int{1, 2}, x.served())
	require.Equal(t, http.StatusOK, send(1, name, of(0)), "another port than the first names its own rank")
	assert.Equal(t, [2]int{1, 3}, x.served())
	for _, nobody := range []string{of(2), of(-1), x.addr(1), "x"} {
		assert.Equal(t, http.StatusBadRequest, send(0, name, nobody), nobody)
	}
	assert.Equal(t, [2]int{1, 3}, x.served())
}

func TestAllRanksDrain(t *testing.T) {
	t.Parallel()
	x := ranks(t, enginesim.Config{ITL: 400 * time.Millisecond}, nil) // streams of 4.4 s
	var streams [2]*http.Response
	for rank := range streams {
		streams[rank] = begin(t, x.addr(rank), header, x.prefiller(rank))
		defer streams[rank].Body.Close()
	}
	code := make(chan int, 1)
	go func() { code <- x.side.stop() }()
	for rank := range streams {
		require.Eventually(t, func() bool {
			return statusOf(fetch(t, x.addr(rank)+"/health")) == http.StatusServiceUnavailable
		}, 20*time.Second, time.Millisecond)
	}
	for rank, s := range streams {
		b, err := io.ReadAll(s.Body)
		require.NoError(t, err, "rank %d", rank)
		assert.Contains(t, string(b), "[DONE]", "rank %d", rank)
	}
	assert.Equal(t, exitOK, <-code)
}

// If a rank's port is taken, the start fails, and no other port stays open.
func TestARankThatCannotListenEndsTheStart(t *testing.T) {
	first := ports(t, 2)
	taken, err := net.Listen("tcp", ":"+strconv.Itoa(first+1))
	require.NoError(t, err)
	defer taken.Close()
	var said sharedtest.Log
	assert.Equal(
		t, exitFailed, run(t.Context(), []string{"--port=" +
			strconv.Itoa(first), "--data-parallel-size=2", "--secure-serving=false", "--prefillers=p:1"}, noEnv,
			io.Discard, &said),
	)
	assert.Contains(t, said.String(), "cannot listen")
	ln, err := net.Listen("tcp", ":"+strconv.Itoa(first))
	require.NoError(t, err)
	_ = ln.Close()
}

// The decode engine gets the P2P tier of the prefill engine's rank, which follows from the engine's port.
func TestTheTierOfARankIsAtItsOwnPort(t *testing.T) {
	f, problem := parse(t, noEnv, "--kv-connector=offloading", "--port=8000", "--data-parallel-size=4",
		"--prefillers=10.0.0.1:7999-8004")
	require.Empty(t, problem)
	set, err := f.list(nil)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = set.Run(ctx) }()
	defer func() { cancel(); <-done }()
	require.Eventually(t, func() bool { return set.Load().Version > 0 }, 20*time.Second, time.Millisecond)
	got := map[string]string{}
	for _, e := range set.Load().Endpoints {
		got[e.URL.Port()] = e.Attribute("p2pPort")
	}
	assert.Equal(
		t, map[string]string{"7999": "", "8000": "", "8001": "7778", "8002": "7779", "8003": "7780", "8004": ""}, got,
		"\"\" is rank 0's tier",
	)
}

// Each source tells its engines by itself. A request that comes when one source has not would find, say, no encode
// engine, and be served without one.
func TestTheFirstRequestWaitsForAllListedEngines(t *testing.T) {
	f, problem := parse(t, noEnv, "--ec-connector=ec-nixl", "--prefillers=10.0.0.1:8000", "--encoders=10.0.0.2:8000")
	require.Empty(t, problem)
	engine := func(host string, role discovery.Role) discovery.Endpoint {
		e, err := discovery.New("http://"+host, role)
		require.NoError(t, err)
		return e
	}
	p, e := engine("10.0.0.1:8000", discovery.RolePrefill), engine("10.0.0.2:8000", discovery.RoleEncode)
	assert.False(t, f.known(&discovery.Snapshot{}))
	assert.False(t, f.known(&discovery.Snapshot{Endpoints: []discovery.Endpoint{p}}))
	assert.False(t, f.known(&discovery.Snapshot{Endpoints: []discovery.Endpoint{e}}))
	assert.True(t, f.known(&discovery.Snapshot{Endpoints: []discovery.Endpoint{p, e}}))
}

// Each address of a headless service stands for all ranks behind it.
func TestANameCanStandForPortsInARow(t *testing.T) {
	x := ranks(t, enginesim.Config{}, nil)
	named := before(t, x.decode[0].URL(), nil, "--prefillers-dns-server="+nameServer(t),
		fmt.Sprintf("--prefillers-dns=prefill.pool.svc.cluster.local:%d-%d", x.p, x.p+1))
	send := func(to string) int {
		return statusOf(complete(t, named.addr, 0, false, header, to))
	}
	require.Eventually(t, func() bool { return send(x.prefiller(0)) == http.StatusOK }, 20*time.Second,
		10*time.Millisecond)
	assert.Empty(t, x.prefill[1].Requests())
	assert.NotEqual(t, http.StatusForbidden, send(x.prefiller(1)))
	assert.Len(t, x.prefill[1].Requests(), 1)
	assert.Equal(t, http.StatusForbidden, send("127.0.0.1:"+strconv.Itoa(x.p+2)))
	assert.Equal(t, http.StatusForbidden, send("127.0.0.1:"+strconv.Itoa(x.p-1)))
}
