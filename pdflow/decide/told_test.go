// SPDX-License-Identifier: Apache-2.0

package decide_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
)

// heard returns what a policy is told of p0 and d0, each of which said a second ago what it has, once this gateway has
// sent requests of 1,000 tokens.
func heard(t *testing.T, sent int, p, d inspect.Load) (prefill, decode decide.Candidate) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		policy := &spy{Policy: decide.Always()}
		begin := time.Now()
		o := &decide.Options{TokenBytes: 1000, Link: 1e6,
			Engine: func(*discovery.Endpoint) decide.Facts { return decide.Facts{Speed: h100, KVTokens: 100_000} },
			Load: func(id string) inspect.Load {
				said := p
				if id == "d0" {
					said = d
				}
				said.At = begin
				return said
			}}
		picker := around(t, newSet(t, engines(1, "")...), policy, o)
		in := &pdflow.PickInput{Request: completion(t, text(3996)), Attempt: 1}
		time.Sleep(time.Second)
		for range sent {
			mustPick(t, picker, in).PrefillDone(&pdflow.LegOutcome{})
		}
		mustPick(t, picker, in)
		prefill, decode = policy.last().Prefill[0], policy.last().Decode[0]
	})
	return prefill, decode
}

// KV that others let move is seen by what engines say: how many requests fetch, and how much a prefill engine holds.
func TestKVOfOthersCountsOnTheLinks(t *testing.T) {
	p, d := heard(t, 0, inspect.Load{}, inspect.Load{})
	assert.Zero(t, p.Moving+d.Moving)

	p, d = heard(t, 0, inspect.Load{KVUsage: .3}, inspect.Load{Waiting: 5, Fetching: 3})
	assert.Equal(t, 30_000, p.Moving)
	assert.Equal(t, 3000, d.Moving, "three prompts like this one")
	assert.Equal(t, 2, d.Queue, "those that fetch do not wait for memory")

	_, d = heard(t, 2, inspect.Load{}, inspect.Load{Waiting: 3, Fetching: 3})
	assert.Equal(t, 3000, d.Moving, "two may be this gateway's own")
}

// What was sent since an engine spoke takes memory; what has ended since then waits no more.
func TestMemoryIsThatOfNow(t *testing.T) {
	_, d := heard(t, 0, inspect.Load{}, inspect.Load{KVUsage: .5})
	assert.Equal(t, 50_000, d.KV.Free)
	_, d = heard(t, 4, inspect.Load{}, inspect.Load{KVUsage: .5})
	assert.Equal(t, 46_000, d.KV.Free)
}

// Requests of others are taken to be as long as this gateway's usual ones, not as the one that is decided on: a long
// prompt does not make the queue before it longer.
func TestRequestsOfOthersAreAsLongAsUsual(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		policy := &spy{Policy: decide.Always()}
		begin := time.Now()
		picker := around(t, newSet(t, engines(1, "")...), policy, &decide.Options{Engine: h100s,
			Load: func(string) inspect.Load { return inspect.Load{At: begin, Running: 1, Waiting: 9} }})
		for range 3 {
			x := mustPick(t, picker, &pdflow.PickInput{Request: completion(t, text(3996)), Attempt: 1})
			x.PrefillDone(&pdflow.LegOutcome{})
			x.Done(&pdflow.Outcome{})
		}
		mustPick(t, picker, &pdflow.PickInput{Request: completion(t, text(399996)), Attempt: 1})
		assert.InDelta(t, 10*1000, policy.last().Prefill[0].QueueTokens, 100)
	})
}
