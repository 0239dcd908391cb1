// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// clients asks for n streams, some at a time, and returns how many had to wait for a timeout, and how many failed.
func (p *program) clients(n int, late time.Duration) (hit, failed int64) {
	var hits, fails, next atomic.Int64
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for {
				i := next.Add(1)
				if i > int64(n) {
					return
				}
				began := time.Now()
				resp, err := http.Post(p.client+"/v1/completions", "application/json", strings.NewReader(
					fmt.Sprintf(`{"model":"tiny","stream":true,"max_tokens":4,"prompt":"client %d of %s"}`, i,
						p.t.Name())))
				if err == nil {
					_, err = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
				if err != nil || resp.StatusCode != http.StatusOK {
					fails.Add(1)
				}
				if time.Since(began) >= late {
					hits.Add(1)
				}
			}
		})
	}
	all.Wait()
	return hits.Load(), fails.Load()
}

// Of two P and two D one pair hangs, and all engines are ready. The gateway finds it after timeouts.transfer, serves
// its clients at other pairs, sends nobody there any more, and goes back to it when a probe has been served.
func TestAPairThatHangsIsProbedBeforeAClientIsSentThere(t *testing.T) {
	t.Parallel()
	p1, d1 := startPair(t)
	p2, d2 := startPair(t)
	d1.Inject(enginesim.Fault{Kind: enginesim.FaultHangTransfer, Leg: enginesim.LegDecode, Peer: p1.EngineID(),
		Count: -1})
	const transfer = 2 * time.Second
	spec := fmt.Sprintf("  kvConnector: {type: nixl, timeouts: {transfer: %s}, retry: {budget: 1}}\n", transfer)
	g := start(t, gatewayYAML("")+simYAML(spec, p1, d1, p2, d2))
	hit, failed := g.clients(60, transfer)
	t.Log("hit", hit)
	assert.Positive(t, hit)
	assert.LessOrEqual(t, hit, int64(12), "those that were there before the first had waited, and few more")
	assert.Zero(t, failed)
	g.logs(1, "does not serve a synthetic probe")
	g.shows(`pd_pair_probes_total{gen_ai_request_model="tiny",pd_result="timed_out"}`)
	for range 3 {
		hit, failed = g.clients(60, transfer)
		assert.Zero(t, hit)
		assert.Zero(t, failed)
	}
	status, _ := g.ready()
	require.Equal(t, http.StatusOK, status)
	_, page := g.live()
	require.Contains(t, page, `"state":"hung"`)

	d1.ClearFaults()
	g.logs(1, "a pair serves after requests ran out of time there") // 8 s after the timeouts, or 16 s
	g.shows(`pd_pair_probes_total{gen_ai_request_model="tiny",pd_result="served"} 1`)
	before := len(d1.Requests())
	hit, _ = g.clients(100, transfer)
	assert.Zero(t, hit)
	assert.Greater(t, len(d1.Requests()), before)
}
